"""Every code that a kernel knows means something of its own: none falls through to another's
meaning."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from numba_prefix.cpu.compile.jit import kernel
from numba_prefix.cpu.kernel import decode_dot, paged_kv
from numba_prefix.cpu.kernel.params import DTYPE_CODES, FIELDS, Params
from numba_prefix.cpu.paths import PATHS, by_name
from numba_prefix.inputs.arrays import ITEM_BYTES
from numba_prefix.inputs.problem import FLOAT_DTYPES

NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@pytest.fixture(scope="module")
def load_and_store() -> Any:
    def copy(dtype: Any, size: Any, source_ptr: Any, wide_ptr: Any, target_ptr: Any) -> Any:
        paged_kv.widen_rows(dtype, source_ptr, 0, wide_ptr, 0, 1, size)
        paged_kv.narrow_row(dtype, wide_ptr, target_ptr, size)
        return paged_kv.item_bytes(dtype)

    compiled = kernel(copy)
    compiled._cache.load_overload = compiled._cache.save_overload = lambda *_: None
    return compiled


@pytest.mark.parametrize("dtype", DTYPE_CODES)
def test_a_dtype(dtype: str, load_and_store: Any) -> None:
    """Rows of whole vectors and of a tail, to float32 and back."""
    assert set(DTYPE_CODES) == set(FLOAT_DTYPES) == set(decode_dot.WIDENED)
    values = np.random.default_rng(0).standard_normal(21).astype(NUMPY[dtype])
    wide, back = np.full(32, np.nan, np.float32), np.zeros_like(values)
    places = (array.ctypes.data for array in (values, wide, back))
    assert load_and_store(DTYPE_CODES[dtype], 21, *places) == ITEM_BYTES[dtype] == NUMPY[dtype].itemsize
    np.testing.assert_array_equal(wide[:21], values.astype(np.float32))
    np.testing.assert_array_equal(wide[21:], 0)
    np.testing.assert_array_equal(back, values)


def test_a_path_that_does_not_exist() -> None:
    assert [by_name(path.name) for path in PATHS] == list(PATHS)
    with pytest.raises(ValueError, match="path: got 'sse', expected one of amx, avx512_bf16, vector"):
        by_name("sse")


def test_a_parameter_that_does_not_exist() -> None:
    params = Params()
    with pytest.raises(KeyError):
        params.set({"q_pointer": 1})
    with pytest.raises(KeyError):
        params["q_pointer"]
    assert len(set(FIELDS)) == len(FIELDS) == len(params.block)


def test_parameters_by_name() -> None:
    """Each field has a place of its own, whatever kind it is."""
    params = Params()
    params.set({"head_size": 7, "has_shift": True, "qk_scale": np.float32(0.5), "unit": np.float32(-2.0)})
    assert (params["head_size"], params["has_shift"], params["block_size"]) == (7, 1, 0)
    bound = params.with_arrays(tuple(range(1, 9)), tuple(range(11, 26))).with_workspace(31, 32, 33, 34)
    assert (bound["q_ptr"], bound["lse_ptr"], bound["q_token_stride"], bound["out_head_stride"]) == (1, 8, 11, 25)
    assert (bound["queue_ptr"], bound["scratch_ptr"], bound["head_size"]) == (31, 34, 7)
    assert params["q_ptr"] == 0
