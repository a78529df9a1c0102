"""An instruction-set path that an operation names, beside the one that a call would take."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from cases import same_bits

import numba_prefix as nbp
from numba_prefix.cpu import isa, target
from numba_prefix.cpu.paths import PATHS
from numba_prefix.verify.testing import Inputs, random_inputs, stored_bits


def inputs_of(dtype: str = "bfloat16", **options: Any) -> Inputs:
    sizes: dict[str, Any] = {"head_num": 2, "kv_head_num": 1, "head_size": 32, "block_size": 16}
    return random_inputs([40, 3], [170, 40], dtype=dtype, mask_type="causal", **sizes | options)


def output(inputs: Inputs, path: str | None) -> tuple[np.ndarray, str]:
    """Bits and reason."""
    op, out = inputs.plan(nbp.Context("cpu"), path)
    op.run()
    assert all(error.ok for error in inputs.judge(out, op.lse))
    return stored_bits(out), op.reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_each_path_of_this_machine(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is what a process forced to this path computes; the variable has no say where a
    path is named."""
    inputs = inputs_of(dtype)
    for path in PATHS:
        if dtype not in path.dtypes or isa.obstacle(path):
            continue
        monkeypatch.setenv(isa.VARIABLE, path.name)
        forced, _ = output(inputs, None)
        monkeypatch.setenv(isa.VARIABLE, "vector")
        named, reason = output(inputs, path.name)
        assert f"path {path.name} on " in reason
        same_bits(named, forced)


def refused(message: str, path: str, context: nbp.Context | None = None, inputs: Inputs | None = None) -> None:
    with pytest.raises(ValueError, match=f"^path: {re.escape(message)}"):
        (inputs or inputs_of()).plan(nbp.Context("cpu") if context is None else context, path)


def test_no_such_path() -> None:
    refused("got 'avx9', expected one of amx, avx512_bf16, vector", "avx9")
    refused("got '', expected one of amx, avx512_bf16, vector", "")


def test_a_path_that_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing on the machine, made for other dtypes, or wrong in its results."""
    lacking = {"amx": "no tiles here"}
    monkeypatch.setattr(isa, "_missing", lambda path: lacking.get(path.name, ""))
    monkeypatch.setattr(isa, "_wrong", {})
    refused("got 'amx' (no tiles here), expected one of avx512_bf16, vector", "amx")
    pairs = "got 'avx512_bf16' (it computes nothing in {}), expected one of vector"
    refused(pairs.format("float16"), "avx512_bf16", inputs=inputs_of("float16"))
    refused(pairs.format("float32"), "avx512_bf16", inputs=inputs_of(qk_scale=2.0**61))

    def make_ready(path: Any) -> bool:
        isa.give_up(path, "wrong here")
        return False

    monkeypatch.setattr(target, "make_ready", make_ready)
    refused("got 'avx512_bf16' (wrong here), expected one of vector", "avx512_bf16")


def test_targets_without_paths() -> None:
    refused("got 'vector', expected None for target 'reference'", "vector", nbp.Context("reference"))
