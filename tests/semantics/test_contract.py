"""Sections 1, 2, 3 and 4 of tests/contract.md: one test per row of its tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import ALIBI, DTYPES, Case, check, make_case, run, same_bits, to_numpy, with_mask

import numba_prefix as nbp
from numba_prefix import MaskType


def small(**extra: Any) -> Case:
    """Two sequences, 4 heads on 2 kv heads, prefixes 17 and 32."""
    options = {"head_num": 4, "kv_head_num": 2, "dtype": "float16"} | extra
    return make_case([3, 5], [20, 37], **options)


# --- 1. arguments


@pytest.mark.parametrize("dtype", DTYPES)
def test_argument_dtype(target: str, dtype: str) -> None:
    """query, key, value: float16, bfloat16, float32; the output has the dtype of query."""
    out = check(small(dtype=dtype), target)
    assert out.dtype == DTYPES[dtype]


@pytest.mark.parametrize("query_form", ["3-D", "2-D"])
@pytest.mark.parametrize("cache_form", ["4-D", "3-D"])
def test_argument_forms(target: str, query_form: str, cache_form: str) -> None:
    """query and caches with the head axis apart or merged: same numbers, and the output is shaped
    as query."""
    case = small()
    expected = run(case, target, return_lse=True)
    given: dict[str, Any] = {}
    if query_form == "2-D":
        given |= {"query": case.query.reshape(8, -1), "head_num": 4}
    if cache_form == "3-D":
        given |= {name: getattr(case, name).reshape(*case.key.shape[:2], -1) for name in ("key", "value")}
        given["kv_head_num"] = 2
    out, lse = run(case, target, return_lse=True, **given)
    assert out.shape == given.get("query", case.query).shape
    assert lse.shape == (8, 4)
    same_bits(out.reshape(8, 4, -1), expected[0])
    same_bits(lse, expected[1])


@pytest.mark.parametrize("dtype", ["int32", "int64", "int16", "uint32", "uint64", "uint8"])
def test_argument_block_tables_dtype(target: str, dtype: str) -> None:
    """block_tables: int32, other integer types are cast with a range check."""
    case = small()
    tables = np.where((case.block_tables < 0) | (case.block_tables > 100), 0, case.block_tables).astype(dtype)
    same_bits(run(case, target, block_tables=tables), run(case, target))


@pytest.mark.parametrize("kind", ["list", "tuple", "int8", "int32", "uint32", "int64", "uint64", "torch"])
def test_argument_lengths(target: str, kind: str) -> None:
    """seq_len, kv_seq_len: list, tuple, NumPy array or CPU tensor."""

    def wrap(lengths: tuple[int, ...]) -> Any:
        if kind == "torch":
            return pytest.importorskip("torch").tensor(lengths)
        return {"list": list, "tuple": tuple}.get(kind, lambda x: np.array(x, kind))(lengths)

    case = small()
    given = {"seq_len": wrap(case.seq_len), "kv_seq_len": wrap(case.kv_seq_len)}
    same_bits(run(case, target, **given), run(case, target))


@pytest.mark.parametrize("form", ["alibi-template", "alibi_sqrt-template", "alibi_left_align-template", "alibi-heads"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_is_float32", [False, True])
def test_argument_mask(target: str, form: str, dtype: str, mask_is_float32: bool) -> None:
    """mask: [256, 256] or [head_num, maskLen, 128], in the dtype of query or float32."""
    mask_dtype = "float32" if mask_is_float32 else dtype
    check(with_mask(small(dtype=dtype), form, mask_dtype=mask_dtype), target)


def test_argument_slopes(target: str) -> None:
    """slopes: one float32 per query head (not per kv head); a list of numbers is taken too."""
    case = with_mask(small(), "alibi_sqrt-generator")
    assert case.slopes is not None and len(set(case.slopes)) == 4
    expected = check(case, target)
    same_bits(run(case, target, slopes=[float(s) for s in case.slopes]), expected)


def test_argument_mask_type(target: str) -> None:
    """mask_type: an int, a MaskType or a name; the default is causal."""
    case = small()
    expected = run(case, target)
    for value in (9, np.int32(9), MaskType.CAUSAL_MASK, "causal", "CAUSAL"):
        same_bits(run(case, target, mask_type=value), expected)
    arguments = {k: v for k, v in case.arguments().items() if k != "mask_type"}
    same_bits(nbp.prefix_encoder(**arguments, target=target), expected)


def test_argument_head_num(target: str) -> None:
    """head_num: omitted or given when query is 3-D, of any integer type."""
    case = small()
    for head_num in (None, 4, np.int64(4)):
        same_bits(run(case, target, head_num=head_num), run(case, target))


@pytest.mark.parametrize(
    ("heads", "kv_head_num", "is_flat"),
    [((4, 4), 0, True), ((4, 4), 0, False), ((4, 4), None, True), ((4, 2), None, False), ((4, 2), 2, True)],
)
def test_argument_kv_head_num(target: str, heads: tuple[int, int], kv_head_num: int | None, is_flat: bool) -> None:
    """kv_head_num: 0 means head_num; None means the 4-D cache's own count, else head_num."""
    case = small(head_num=heads[0], kv_head_num=heads[1])
    given = {name: getattr(case, name).reshape(*case.key.shape[:2], -1) for name in ("key", "value") if is_flat}
    same_bits(run(case, target, kv_head_num=kv_head_num, **given), run(case, target))


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0, -0.5, 1, np.float32(0.25), np.float64(0.25), 30.0])
def test_argument_qk_scale(target: str, scale: Any) -> None:
    """qk_scale: any finite number, 1.0 by default."""
    case = small(qk_scale=float(scale))
    check(case, target)
    same_bits(run(case, target, qk_scale=scale), run(case, target))
    if scale == 1.0:
        arguments = case.arguments()
        arguments.pop("qk_scale")
        same_bits(nbp.prefix_encoder(**arguments, target=target), run(case, target))


@pytest.mark.parametrize("head_size", [5, 16, 100])
def test_argument_out(target: str, head_size: int) -> None:
    """out: every element is written, it is what the call returns, and it may be strided."""
    case = make_case([0, 3, 5, 0], [4, 20, 37, 0], head_num=4, kv_head_num=2, head_size=head_size)
    expected = run(case, target)
    out = np.full(case.query.shape, np.nan, np.float32)
    assert run(case, target, out=out) is out
    same_bits(out, expected)
    wide = np.full((8, 6, head_size + 3), np.nan, np.float32)
    view = wide[:, 1:5, 2:-1]
    run(case, target, out=view)
    same_bits(view, expected)
    view[...] = np.nan
    assert np.isnan(wide).all()


# --- 2. mask types

NAMES = {
    0: ["NONE", "none"],
    3: ["alibi", "alibi_compress", "mask_type_alibi_compress", "ALIBI_COMPRESS"],
    4: ["alibi_sqrt", "alibi_compress_sqrt", "mask_type_alibi_compress_sqrt", "mask_type_alibi_compress_sort"],
    5: ["alibi_left_align", "alibi_compress_left_align", "ALIBI_COMPRESS_LEFT_ALIGN"],
    9: ["causal", "causal_mask", "mask_type_causal_mask", "norm_compress", "mask_type_norm_compress"],
}


@pytest.mark.parametrize("number", NAMES)
def test_mask_type_names(target: str, number: int) -> None:
    """Every number and every name of the table gives the same result."""
    case = small()
    if MaskType(number).is_alibi:
        case = replace(case, slopes=np.float32([0.5, 0.25, 0.125, 1.0]))
    expected = check(replace(case, mask_type=number), target)
    for value in (*NAMES[number], MaskType(number)):
        same_bits(run(case, target, mask_type=value), expected)


def test_mask_type_numbers() -> None:
    """The operator's page numbers them so; ATB's C++ header otherwise."""
    assert {m.name: int(m) for m in MaskType} == {
        "NONE": 0,
        "ALIBI_COMPRESS": 3,
        "ALIBI_COMPRESS_SQRT": 4,
        "ALIBI_COMPRESS_LEFT_ALIGN": 5,
        "CAUSAL_MASK": 9,
    }
    header = {3: 9, 4: 3, 5: 4, 6: 5, 9: 9}
    assert {n: int(MaskType.from_atb_header(n)) for n in header} == header
    for unknown in (-1, 7, 10):
        with pytest.raises(ValueError, match=str(unknown)):
            MaskType.from_atb_header(unknown)


@pytest.mark.parametrize("unknown", [1, 2, 6, -3, 99, "alibi_sort", "", "causal "])
def test_mask_type_unknown(target: str, unknown: Any) -> None:
    """Unknown number or name: ValueError that lists what is accepted."""
    with pytest.raises(ValueError, match="mask_type") as caught:
        run(small(), target, mask_type=unknown)
    assert all(name in str(caught.value) for name in ("NONE", "ALIBI_COMPRESS_SQRT", "causal", "alibi_left_align"))


@pytest.mark.parametrize("wrong", [True, 9.0, None, [9]])
def test_mask_type_of_another_type(target: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match="mask_type"):
        run(small(), target, mask_type=wrong)


def test_mask_type_norm_compress(target: str) -> None:
    """NORM_COMPRESS is causal; a mask given with it has to be [128, 128] and is never read."""
    case = small()
    mask = np.full((128, 128), np.nan, np.float16)
    same_bits(run(case, target, mask_type="norm_compress", mask=mask), run(case, target))
    with pytest.raises(ValueError, match=r"mask.*\(256, 256\)"):
        run(case, target, mask_type="norm_compress", mask=np.zeros((256, 256), np.float16))


# --- 3. ALiBi


@pytest.mark.parametrize("kind", ALIBI)
@pytest.mark.parametrize("how", ["template", "heads", "generator"])
def test_alibi_tables(target: str, kind: str, how: str) -> None:
    """Each kind in each form, rows and keys in four template blocks, n == m and n < m."""
    case = make_case([140, 60, 1], [140, 330, 500], head_num=4, kv_head_num=2, dtype="float16", block_size=48)
    check(with_mask(case, f"{kind}-{how}", seed=9), target)


def test_alibi_mask_len(target: str) -> None:
    """maskLen must be at least max(kv_seq_len); exactly as long is enough."""
    case = small()
    mask = np.random.default_rng(0).standard_normal((4, 37, 128)).astype(np.float32)
    check(replace(case, mask_type="alibi", mask=mask), target)
    with pytest.raises(ValueError, match=r"mask.*36.*37"):
        run(case, target, mask_type="alibi", mask=mask[:, :36])


@pytest.mark.parametrize(
    ("head_num", "tail"), [(12, [0.707107, 0.353553, 0.176777, 0.088388]), (40, [0.917004, 0.771105])]
)
def test_alibi_slopes(head_num: int, tail: list[float]) -> None:
    """alibi_slopes: the paper's, for head counts that are no power of two as well."""
    slopes = nbp.alibi_slopes(head_num)
    power = 1 << (head_num.bit_length() - 1)
    assert slopes.dtype == np.float32 and slopes.shape == (head_num,)
    np.testing.assert_allclose(slopes[:power], 2.0 ** (-8 * np.arange(1, power + 1) / power), rtol=1e-6)
    np.testing.assert_allclose(slopes[power : power + len(tail)], tail, rtol=0, atol=5e-7)


# --- 4. limits lifted


@pytest.mark.parametrize("prefix", [0, 1, 5, 127, 128, 129, 256])
def test_limit_prefix(target: str, prefix: int) -> None:
    """(kv_seq_len - seq_len) % 128 == 0 is not asked for."""
    check(make_case([20, 1], [20 + prefix, 1 + prefix], head_num=2, dtype="float16"), target)


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16, 19, 48, 96, 127, 128, 129, 256, 1000])
def test_limit_block_size(target: str, block_size: int) -> None:
    """Any block size from 1 up."""
    check(make_case([20, 1], [129, 257], head_num=2, dtype="float16", block_size=block_size), target)


@pytest.mark.parametrize("head_size", [1, 2, 3, 15, 16, 17, 33, 48, 72, 80, 96, 100, 112, 128, 129, 160, 192, 250, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_limit_head_size(target: str, head_size: int, dtype: str) -> None:
    """Any head size from 1 to 256."""
    case = make_case([20, 1], [20, 70], head_num=2, kv_head_num=1, dtype=dtype, head_size=head_size)
    check(case, target)


def test_limit_block_times_head(target: str) -> None:
    """block_size * head_size has no limit of its own."""
    check(make_case([3], [600], head_size=256, block_size=512, dtype="bfloat16"), target)


def test_limit_left_align(target: str) -> None:
    """The left-aligned kind is not refused for this operator."""
    check(with_mask(small(), "alibi_left_align-generator"), target)


def test_every_element_is_float32_inside(target: str) -> None:
    """Scores beyond float16's range: 16 * 100 * 100 = 160,000 against 159,200, scale 0.005 leaves a
    gap of 4."""
    case = make_case(
        [1],
        [2],
        dtype="float16",
        query=100.0,
        key=lambda b, j, h, c: 100.0 - 0.5 * j,
        value=lambda b, j, h, c: j,
        qk_scale=0.005,
    )
    weight = np.exp(-4.0) / (1 + np.exp(-4.0))
    np.testing.assert_allclose(to_numpy(run(case, target)).astype(float), weight, rtol=2e-3)
