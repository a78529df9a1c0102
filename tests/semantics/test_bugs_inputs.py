"""Public bug reports of this field as cases, D16 to D29 of bugs.md: layouts, dtypes, rounding,
index types, read-only memory."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, Case, assert_near, bits, check, make_case, naming, repaged, run, same_bits, with_mask
from processes import run_script

BF16 = ml_dtypes.bfloat16


def small(**extra: Any) -> Case:
    return make_case([3, 5], [20, 37], **({"head_num": 4, "kv_head_num": 2, "dtype": "float16"} | extra))


# --- D16, D17: layouts and tables


def test_d16_query_in_a_fused_projection(target: str) -> None:
    """pytorch PR#187506, flash-attention#2665: a view is honoured; the output is fresh and
    contiguous."""
    case = small()
    fused = np.full((8, 3 * 64), np.nan, np.float16)
    fused[:, :64] = case.query.reshape(8, 64)
    out = run(case, target, query=fused[:, :64], head_num=4)
    assert out.flags.c_contiguous and out.shape == (8, 64)
    same_bits(out.reshape(case.query.shape), run(case, target))


def test_d16_query_transposed(target: str) -> None:
    case = small()
    for axes in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        view = np.ascontiguousarray(case.query.transpose(axes)).transpose(np.argsort(axes))
        assert not view.flags.c_contiguous
        same_bits(run(case, target, query=view), run(case, target))


def test_d16_every_second_block(target: str) -> None:
    case = small()
    pools = {}
    for name in ("key", "value"):
        pool = np.full((2 * case.key.shape[0], *case.key.shape[1:]), np.nan, np.float16)
        pool[::2] = getattr(case, name)
        pools[name] = pool[::2]
    same_bits(run(case, target, **pools), run(case, target))


def test_d16_table_as_columns(target: str) -> None:
    case = small()
    wide = np.full((2, 3 * case.block_tables.shape[1]), -5, np.int32)
    wide[:, 1::3] = case.block_tables
    same_bits(run(case, target, block_tables=wide[:, 1::3]), run(case, target))


def test_d16_one_page_seen_everywhere(target: str) -> None:
    """Stride 0 along the blocks: a broadcast cache."""
    case = small()
    views = {n: np.broadcast_to(getattr(case, n)[case.block_tables[0, 0]], case.key.shape) for n in ("key", "value")}
    same_bits(run(case, target, **views), run(case, target, **{n: v.copy() for n, v in views.items()}))


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_d16_frombuffer_at_an_offset(target: str, offset: int) -> None:
    """Float16 from any byte of a buffer, aligned or not."""
    case = small()
    given = {}
    for name in ("query", "key", "value"):
        raw = b"\0" * offset + getattr(case, name).tobytes()
        given[name] = np.frombuffer(raw, np.float16, offset=offset).reshape(getattr(case, name).shape)
    same_bits(run(case, target, **given), run(case, target))


@pytest.mark.parametrize("tail", [[-1, -1], [2**31 - 1, 2**31 - 1], [-1, 2**31 - 1], [0, 1], []])
def test_d17_stale_tail(target: str, tail: list[int]) -> None:
    """vllm#42494: entries past the pages needed, and a table exactly as wide as needed."""
    case = make_case([2], [20], tail=0, dtype="float16")
    table = np.concatenate([case.block_tables[0], np.int32(tail)])[None].astype(np.int32)
    same_bits(run(case, target, block_tables=table), run(case, target))


@pytest.mark.skipif(sys.platform == "win32", reason="uses mprotect")
def test_d17_nothing_outside_is_touched(kernel: str) -> None:
    """Every argument ends at unmapped memory, then begins right after it: no access outside, for
    odd sizes too."""
    run_script("guard_pages.py", kernel)


# --- D20, D21, D22: 16-bit floats


def test_d20_float16_on_the_cpu(target: str) -> None:
    """numba#4402: float16 in, float16 out."""
    assert check(small(), target).dtype == np.float16


@pytest.mark.parametrize("dtype", ["float64", "int16", "uint16", ">f2", ">f4", "complex64", "bool"])
def test_d20_other_dtypes(target: str, dtype: str) -> None:
    """One TypeError that names the dtype and what is accepted."""
    case = small()
    given = {name: np.zeros(getattr(case, name).shape, dtype) for name in ("query", "key", "value")}
    with pytest.raises(TypeError, match=naming("query", dtype)):
        run(case, target, **given)


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids="-".join)
def test_d21_dtype_matrix(target: str, dtypes: tuple[str, str, str]) -> None:
    """numba-cuda#198: query, key and value of one dtype work; any mix is a TypeError that names the
    odd one."""
    case = small()
    given = {n: getattr(case, n).astype(DTYPES[d]) for n, d in zip(("query", "key", "value"), dtypes, strict=True)}
    if len(set(dtypes)) == 1:
        out = run(case, target, **given)
        assert out.dtype == DTYPES[dtypes[0]]
        return
    odd = "key" if dtypes[1] != dtypes[0] else "value"
    with pytest.raises(TypeError, match=naming(odd, dtypes[0], dtypes[["query", "key", "value"].index(odd)])):
        run(case, target, **given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_dtype", [*DTYPES, "float64", "bool", "int32"])
def test_d21_mask_dtype(target: str, dtype: str, mask_dtype: str) -> None:
    """A mask has the dtype of query or float32; all else is a TypeError."""
    case = with_mask(small(dtype=dtype), "alibi-template")
    assert case.mask is not None
    with np.errstate(invalid="ignore"):
        mask = case.mask.astype(DTYPES.get(mask_dtype, mask_dtype))
    if mask_dtype in (dtype, "float32"):
        check(replace(case, mask=mask), target)
        return
    with pytest.raises(TypeError, match=naming("mask", mask_dtype)):
        run(case, target, mask=mask)


def test_d21_without_ml_dtypes() -> None:
    """float16 and float32 need no ml_dtypes; neither do torch's bfloat16 tensors."""
    run_script("without_ml_dtypes.py")


@pytest.mark.parametrize(
    ("a", "b", "mean"), [(1.0078125, 1.015625, 1.015625), (1.0, 1.0078125, 1.0), (3.0, 3.015625, 3.0)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_d22_rounding_to_nearest_even(target: str, a: float, b: float, mean: float, sign: int) -> None:
    """groonga PR#2961, dotnet/runtime PR#130583: ties of bfloat16 go to the even neighbour."""
    case = make_case([1], [2], query=0.0, value=lambda _, j, h, c: sign * np.where(j == 0, a, b), dtype="bfloat16")
    np.testing.assert_array_equal(run(case, target).astype(float), sign * mean)


@pytest.mark.parametrize(("a", "b", "mean"), [(1 + 2**-10, 1 + 2**-9, 1 + 2**-9), (1.0, 1 + 2**-10, 1.0)])
def test_d22_rounding_of_float16(target: str, a: float, b: float, mean: float) -> None:
    case = make_case([1], [2], query=0.0, value=lambda _, j, h, c: np.where(j == 0, a, b), dtype="float16")
    np.testing.assert_array_equal(run(case, target).astype(float), mean)


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=["float16", "bfloat16"])
def test_d22_identity_over_all_patterns(target: str, dtype: Any) -> None:
    """numba-cuda PR#376: all 65536 patterns come through; NaN stays NaN, infinity stays infinity,
    subnormals stay."""
    patterns = np.arange(65536, dtype=np.uint16).view(dtype).reshape(256, 1, 256)
    case = make_case([1] * 256, [1] * 256, head_size=256, dtype=np.dtype(dtype).name, query=0.0, spare=0, block_size=1)
    cache = np.empty_like(case.value)
    cache[case.block_tables[:, 0]] = patterns[:, None]
    out = run(case, target, value=cache)
    wide, expected = out.astype(np.float32), patterns.astype(np.float32)
    np.testing.assert_array_equal(wide, expected)  # NaN equals NaN here, zero of either sign equals zero
    same = np.isfinite(expected) & (expected != 0)
    np.testing.assert_array_equal(bits(out)[same], bits(patterns)[same])


# --- D28, D29: index types, read-only memory


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("name", ["block_tables", "seq_len", "kv_seq_len"])
def test_d28_integer_types(target: str, name: str, dtype: str) -> None:
    """numba#7382: every integer type of every index argument gives the same bits."""
    case = small(tail=0)
    given = np.maximum(np.asarray(getattr(case, name)), 0).astype(dtype)
    same_bits(run(case, target, **{name: given}), run(case, target))


@pytest.mark.parametrize("name", ["block_tables", "seq_len", "kv_seq_len"])
def test_d28_torch_tensors(target: str, name: str) -> None:
    torch = pytest.importorskip("torch")
    case = small()
    for dtype in (torch.int32, torch.int64):
        tensor = torch.as_tensor(np.asarray(getattr(case, name))).to(dtype)
        same_bits(run(case, target, **{name: tensor}), run(case, target))
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(TypeError, match=name):
            run(case, target, **{name: torch.as_tensor(np.asarray(getattr(case, name))).to(dtype)})


@pytest.mark.parametrize("dtype", ["bool", "float32", "float64", "complex64", "object"])
@pytest.mark.parametrize("name", ["block_tables", "seq_len", "kv_seq_len"])
def test_d28_other_types(target: str, name: str, dtype: str) -> None:
    case = small()
    with pytest.raises(TypeError, match=name):
        run(case, target, **{name: np.asarray(getattr(case, name)).astype(dtype)})


@pytest.mark.parametrize("value", [2**32 + 1, 2**32, -(2**32) + 1, 2**63 - 1, -(2**63)])
def test_d28_nothing_wraps(target: str, value: int) -> None:
    """2**32 + 1 is not page 1: refused where it is read, ignored in the tail."""
    case = small()
    tables = case.block_tables.astype(np.int64)
    tables[1, -1] = value
    same_bits(run(case, target, block_tables=tables), run(case, target))
    tables[1, 1] = value
    with pytest.raises(ValueError, match=naming("block_tables", 1, str(value))):
        run(case, target, block_tables=tables)


def test_d28_uint64_beyond_int64(target: str) -> None:
    case = small()
    tables = np.maximum(case.block_tables, 0).astype(np.uint64)
    tables[0, 0] = 2**64 - 1
    with pytest.raises(ValueError, match=naming("block_tables", 0, str(2**64 - 1))):
        run(case, target, block_tables=tables)


@pytest.mark.parametrize("dtype", DTYPES)
def test_d29_memory_mapped_inputs(target: str, tmp_path: Path, dtype: str) -> None:
    """numba#4511: np.load(mmap_mode="r") for every array, files unchanged by the call."""
    case = with_mask(small(dtype=dtype), "alibi-template")
    given, files = {}, {}
    for name in ("query", "key", "value", "block_tables", "mask", "slopes"):
        array = getattr(case, name)
        path = tmp_path / f"{name}.npy"
        np.save(path, array.view(np.int16) if array.dtype == BF16 else array)
        files[path] = path.read_bytes()
        mapped = np.load(path, mmap_mode="r")
        given[name] = mapped.view(BF16) if array.dtype == BF16 else mapped
    same_bits(run(case, target, **given), run(case, target))
    assert all(path.read_bytes() == content for path, content in files.items())


def test_d29_torch_shared_memory(target: str) -> None:
    torch = pytest.importorskip("torch")
    case = small()
    shared = {n: torch.from_numpy(getattr(case, n).copy()).share_memory_() for n in ("query", "key", "value")}
    tables = torch.from_numpy(case.block_tables)
    same_bits(run(case, target, block_tables=tables, **shared), run(case, target))


# --- D42 on every target: many sequences


@pytest.mark.parametrize("batch", [65535, 65536, 70000])
def test_d42_batch_beyond_65535(kernel: str, batch: int) -> None:
    """triton#580, mlx#2267: one query and one key for each of 70,000 sequences; the output is the
    value."""
    case = make_case([1], [1], dtype="bfloat16")
    rng = np.random.default_rng(0)
    values = rng.integers(-128, 128, (batch, 1, 1, 16)).astype(BF16)
    tables = rng.permutation(batch).astype(np.int32)[:, None]
    ones = [1] * batch
    out = run(
        case,
        kernel,
        query=np.ones((batch, 1, 16), BF16),
        key=np.ones((batch, 1, 1, 16), BF16),
        value=values,
        block_tables=tables,
        seq_len=ones,
        kv_seq_len=ones,
    )
    same_bits(out, values[tables[:, 0], 0])


def test_d08_any_block_size_gives_the_same_bits(target: str) -> None:
    """Where the pages end is not seen in the result."""
    case = make_case([1, 30], [300, 257], head_num=2, dtype="bfloat16", block_size=16)
    expected = run(case, target)
    for block_size in (1, 7, 48, 300):
        same_bits(run(repaged(case, seed=2, block_size=block_size), target), expected)
    assert_near(run(replace(case, query=case.query * 0, qk_scale=0.0), target)[0], case.values[0].mean(0, dtype=float))
