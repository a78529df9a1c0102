"""The few functions that rules are written in.

A rule in masks.py or softmax.py is plain arithmetic plus these functions. This module defines them
for NumPy scalars and arrays (the tests of the rules use these) and for torch tensors;
cpu/simd/lanes.py defines them for vectors of lanes, cuda/kernel/rules.py for a thread's scalars.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

F32_ZERO = np.float32(0.0)
F32_ONE = np.float32(1.0)
F32_NEG_INF = np.float32(-np.inf)


def _library(*values: Any) -> Any:
    """The module whose functions take these values: torch if one of them is a tensor (torch is then
    imported already), else NumPy."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and any(isinstance(v, torch.Tensor) for v in values) else np


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`; the value not chosen never enters the result."""
    return _library(condition).where(condition, yes, no)


def maximum(a: Any, b: Any) -> Any:
    """The larger; `a` where either is NaN."""
    return where(b > a, b, a)


def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once or twice, whichever is faster on the target."""
    return a * b + c


def sqrt(x: Any) -> Any:
    """Square root; NaN below zero."""
    with np.errstate(invalid="ignore"):
        return _library(x).sqrt(x)


def exp2_scaled(x: Any, scale: Any) -> Any:
    """2**(x * scale) in float32; exactly 0 below 2**-126 (or a little above it), NaN stays NaN."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        power = x * scale
        return where(power < np.float32(-126.0), F32_ZERO, _library(power).exp2(power))


def log2(x: Any) -> Any:
    """Base-2 logarithm of x > 0 in float32; -inf at 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _library(x).log2(x)


def to_f32(x: Any) -> Any:
    """An integer as float32, rounded once."""
    torch = _library(x)
    return np.asarray(x).astype(np.float32) if torch is np else x.to(torch.float32)
