"""Whether a path computes the right thing on this machine: asked once, before its first call.

A CPU, a virtual machine or an emulator may say that it has instructions, and have them wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import Tensor, contiguous_strides, data_address
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.inputs.problem import Operands, Problem

HEAD_SIZE, BLOCK_SIZE = 48, 16
Q_LEN, KV_LEN = 37, 165  # two strips that meet keys twice, none of them full
# In units of the largest output: the formats' rounding is 2e-3 and 2e-4, anything left out or put
# elsewhere is 1.
TOLERANCE = {"bfloat16": 0.02, "float16": 0.002}


class Case(NamedTuple):
    """A causal problem of one sequence and one head, on normally distributed data."""

    problem: Problem
    operands: Operands
    q_len: NDArray[np.int64]
    kv_len: NDArray[np.int64]


Compute = Callable[[Problem, Operands, NDArray[np.int64], NDArray[np.int64]], None]


def is_right(dtype: str, compute: Compute) -> bool:
    """compute: writes a problem's output."""
    case = random_case(dtype, Q_LEN, KV_LEN, HEAD_SIZE, BLOCK_SIZE)
    compute(*case)
    o = case.operands
    assert o.out is not None
    x, keys, values, out = (_values(t.owner, dtype).reshape(-1, HEAD_SIZE) for t in (o.q, o.k_cache, o.v_cache, o.out))
    scores = case.problem.qk_scale * (x @ keys[:KV_LEN].T)
    scores[np.arange(KV_LEN) > np.arange(KV_LEN - Q_LEN, KV_LEN)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = (weights / weights.sum(axis=1, keepdims=True)) @ values[:KV_LEN]
    error = np.abs(out - expected).max()
    return bool(error <= TOLERANCE[dtype] * np.abs(expected).max())


def random_case(dtype: str, q_len: int, kv_len: int, head_size: int, block_size: int) -> Case:
    """A problem of a 16-bit dtype; its output is NaN."""
    rng = np.random.default_rng(0)
    num_blocks = -(-kv_len // block_size)
    q, k, v = (
        _stored(rng.standard_normal(shape, np.float32), dtype)
        for shape in ((q_len, 1, head_size), *((num_blocks, block_size, 1, head_size),) * 2)
    )
    out = np.full(q.shape, 0x7E00 if dtype == "float16" else 0x7FC0, np.uint16)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    problem = Problem(
        dtype, q_len, 1, 1, 1, head_size, num_blocks, block_size, num_blocks, MaskType.CAUSAL_MASK, "none", None, 0, False,
        head_size**-0.5,
    )  # fmt: skip
    query, k_cache, v_cache, target = (_tensor(a, dtype) for a in (q, k, v, out))
    operands = Operands(query, k_cache, v_cache, _tensor(table, "int32"), None, None, target)
    return Case(problem, operands, np.array([q_len]), np.array([kv_len]))


def _stored(x: NDArray[np.float32], dtype: str) -> NDArray[np.uint16]:
    return x.astype(np.float16).view(np.uint16) if dtype == "float16" else (x.view(np.uint32) >> 16).astype(np.uint16)


def _values(stored: NDArray[np.uint16], dtype: str) -> NDArray[np.float64]:
    if dtype == "float16":
        return stored.view(np.float16).astype(np.float64)
    return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _tensor(array: NDArray[Any], dtype: str) -> Tensor:
    return Tensor(
        "", array, "numpy", data_address(array), dtype, array.shape, contiguous_strides(array.shape), "cpu", True
    )
