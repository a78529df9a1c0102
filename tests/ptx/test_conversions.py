"""Comparisons, choices and conversions."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

from ptx.forms import DTYPES
from ptx.text import apply

RNG = np.random.default_rng(4)
NAN, INF = float("nan"), float("inf")
COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@pytest.mark.parametrize("kind", ["s32", "u32", "s16", "u64", "b32"])
def test_integer_comparisons(kind: str) -> None:
    limits = np.iinfo(DTYPES[kind])
    a = RNG.integers(limits.min, limits.max, 64, DTYPES[kind], endpoint=True)
    b = np.where(RNG.random(64) < 0.3, a, RNG.permutation(a))
    names = ["eq", "ne"] if kind == "b32" else list(COMPARISONS)
    for name in names:
        expected = [COMPARISONS[name](int(x), int(y)) for x, y in zip(a, b, strict=True)]
        assert apply(f"setp.{name}.{kind} %o, %a, %b;", "pred", (kind, a), (kind, b)).tolist() == expected, name
    if kind[0] == "u":
        for name, same in {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.items():
            expected = [COMPARISONS[same](int(x), int(y)) for x, y in zip(a, b, strict=True)]
            assert apply(f"setp.{name}.{kind} %o, %a, %b;", "pred", (kind, a), (kind, b)).tolist() == expected, name


@pytest.mark.parametrize("kind", ["f32", "f64", "f16"])
def test_float_comparisons_and_nan(kind: str) -> None:
    values = [NAN, -INF, -1.0, -0.0, 0.0, 2.0, INF]
    a, b = (grid.reshape(-1) for grid in np.meshgrid(values, values))
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    for name, rule in COMPARISONS.items():
        ordered = [not np.isnan(pair).any() for pair in pairs]
        plain = [rule(x, y) and known for (x, y), known in zip(pairs, ordered, strict=True)]
        unordered = [rule(x, y) or not known for (x, y), known in zip(pairs, ordered, strict=True)]
        assert apply(f"setp.{name}.{kind} %o, %a, %b;", "pred", (kind, a), (kind, b)).tolist() == plain, name
        assert apply(f"setp.{name}u.{kind} %o, %a, %b;", "pred", (kind, a), (kind, b)).tolist() == unordered, name
    assert apply(f"setp.num.{kind} %o, %a, %b;", "pred", (kind, a), (kind, b)).tolist() == ordered
    assert apply(f"setp.nan.{kind} %o, %a, %b;", "pred", (kind, a), (kind, b)).tolist() == [
        not known for known in ordered
    ]


def test_joined_comparisons() -> None:
    a, b, c = [1, 1, 5, 5], [3, 3, 3, 3], [True, False, True, False]
    inputs = ("s32", a), ("s32", b), ("pred", c)
    assert apply("setp.lt.and.s32 %o, %a, %b, %c;", "pred", *inputs).tolist() == [True, False, False, False]
    assert apply("setp.lt.or.s32 %o, %a, %b, !%c;", "pred", *inputs).tolist() == [True, True, False, True]
    assert apply("setp.lt.xor.s32 %o, %a, %b, %c;", "pred", *inputs).tolist() == [False, True, True, False]
    # The second predicate is of the opposite comparison, joined too.
    assert apply("setp.lt.and.s32 %p1|%o, %a, %b, %c;", "pred", *inputs).tolist() == [False, False, True, False]
    assert apply("set.lt.u32.s32 %o, %a, %b;", "u32", *inputs[:2]).tolist() == [0xFFFFFFFF, 0xFFFFFFFF, 0, 0]
    assert apply("set.lt.f32.s32 %o, %a, %b;", "f32", *inputs[:2]).tolist() == [1, 1, 0, 0]


def test_choices() -> None:
    a, b, c = [1.0, 2.0, NAN], [4.0, NAN, 6.0], [True, False, True]
    np.testing.assert_array_equal(
        apply("selp.f32 %o, %a, %b, %c;", "f32", ("f32", a), ("f32", b), ("pred", c)), [1, NAN, NAN]
    )
    np.testing.assert_array_equal(apply("selp.b32 %o, 7, -1, %a;", "s32", ("pred", c)), [7, -1, 7])
    np.testing.assert_array_equal(
        apply("slct.s32.s32 %o, %a, %b, %c;", "s32", ("s32", 1), ("s32", 2), ("s32", [0, -1, 5])), [1, 2, 1]
    )
    np.testing.assert_array_equal(
        apply("slct.f32.f32 %o, %a, %b, %c;", "f32", ("f32", 1), ("f32", 2), ("f32", [-0.0, NAN, -3])), [1, 2, 2]
    )
    logic = apply("xor.pred %p1, %a, %b; not.pred %o, %p1;", "pred", ("pred", [1, 1, 0]), ("pred", [1, 0, 0]))
    assert logic.tolist() == [True, False, True]


@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("of", ["s8", "u8", "s16", "u32", "s32", "u64", "s64"])
def test_integers_to_integers(of: str, to: str) -> None:
    limits = np.iinfo(DTYPES[of])
    a = RNG.integers(limits.min, limits.max, 40, DTYPES[of], endpoint=True)
    a[:2] = limits.min, limits.max
    mask = (1 << 8 * DTYPES[to].itemsize) - 1
    expected = np.array([int(x) & mask for x in a], f"u{DTYPES[to].itemsize}").view(DTYPES[to])
    # Results narrower than their register are extended by sign, or zeros.
    wide = {"s8": "s32", "u8": "u32"}.get(to, to)
    np.testing.assert_array_equal(apply(f"cvt.{to}.{of} %o, %a;", wide, (of, a)), expected)
    ends = np.iinfo(DTYPES[to])
    clamped = [min(max(int(x), ends.min), ends.max) for x in a]
    np.testing.assert_array_equal(apply(f"cvt.sat.{to}.{of} %o, %a;", wide, (of, a)), np.array(clamped, DTYPES[to]))


def test_floats_to_integers() -> None:
    a = [2.5, 3.5, -2.5, -0.4, 1e10, -1e10, INF, -INF, NAN, 255.9, -129.0]
    low, high = -(2**31), 2**31 - 1
    rounded = {
        "rni": [2, 4, -2, 0, high, low, high, low, 0, 256, -129],
        "rzi": [2, 3, -2, 0, high, low, high, low, 0, 255, -129],
        "rmi": [2, 3, -3, -1, high, low, high, low, 0, 255, -129],
        "rpi": [3, 4, -2, 0, high, low, high, low, 0, 256, -129],
    }
    for how, expected in rounded.items():
        assert apply(f"cvt.{how}.s32.f32 %o, %a;", "s32", ("f32", a)).tolist() == expected, how
    assert apply("cvt.rzi.u32.f32 %o, %a;", "u32", ("f32", a)).tolist()[2:9] == [0, 0, 2**32 - 1, 0, 2**32 - 1, 0, 0]
    assert apply("cvt.rzi.s8.f32 %o, %a;", "s32", ("f32", [200.0, -200.0, 5.5])).tolist() == [127, -128, 5]
    ends = apply("cvt.rzi.s64.f32 %o, %a;", "s64", ("f32", [9.3e18, -9.3e18, 2.0**62, NAN])).tolist()
    assert ends == [2**63 - 1, -(2**63), 2**62, -(2**63)]
    assert apply("cvt.rzi.u64.f64 %o, %a;", "u64", ("f64", [1.9e19, -1.0, 2.0**63, NAN])).tolist() == [
        2**64 - 1,
        0,
        2**63,
        2**63,
    ]
    assert apply("cvt.rzi.s32.f64 %o, %a;", "s32", ("f64", [2147483646.9, 2147483648.0, NAN])).tolist()[:2] == [
        high - 1,
        high,
    ]


def test_floats_rounded_to_whole_floats() -> None:
    a = np.float32([2.5, 3.5, -2.5, -0.4, 1e30, INF])
    for how, rule in {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.items():
        np.testing.assert_array_equal(apply(f"cvt.{how}.f32.f32 %o, %a;", "f32", ("f32", a)), rule(a))
    np.testing.assert_array_equal(
        apply("cvt.sat.f32.f32 %o, %a;", "f32", ("f32", [-1, 0.25, 7, NAN])), np.float32([0, 0.25, 1, 0])
    )
    assert apply("cvt.ftz.f32.f32 %o, %a;", "f32", ("f32", 1e-40)) == 0


@pytest.mark.parametrize("of", ["s32", "u32", "s64", "u64"])
def test_integers_to_floats(of: str) -> None:
    limits = np.iinfo(DTYPES[of])
    a = RNG.integers(limits.min, limits.max, 60, DTYPES[of], endpoint=True)
    a[:3] = limits.max, 2**24 + 1, 2**24 + 3
    nearest = apply(f"cvt.rn.f32.{of} %o, %a;", "f32", (of, a))
    np.testing.assert_array_equal(nearest, [np.float32(int(x)) if of.endswith("32") else _float32(int(x)) for x in a])
    down, up = (apply(f"cvt.{how}.f32.{of} %o, %a;", "f32", (of, a)) for how in ("rm", "rp"))
    for x, below, near, above in zip(a, down, nearest, up, strict=True):
        assert int(below) <= int(x) <= int(above) and near in (below, above)
        assert below == above or np.nextafter(below, np.float32(INF)) == above


def _float32(value: int) -> np.float32:
    """To nearest even, from all bits."""
    shift = max(abs(value).bit_length() - 24, 0)
    whole, rest = abs(value) >> shift, abs(value) & ((1 << shift) - 1)
    half = 1 << shift >> 1
    whole += rest > half or (rest == half and whole & 1 and shift > 0)
    return np.float32(whole * 2.0**shift * (-1 if value < 0 else 1))


SIXTEEN = [
    1.0,
    -2.5,
    65504.0,
    65519.0,
    65520.0,
    1e-8,
    6e-8,
    1.0009765,
    1.00048828125,
    1.0014648,
    INF,
    -INF,
    NAN,
    0.0,
    -0.0,
    3e38,
]


def test_float16() -> None:
    a = np.float32(SIXTEEN)
    found = apply("cvt.rn.f16.f32 %o, %a;", "f16", ("f32", a))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, a.astype(np.float16))
    assert found.view(np.uint16)[12] == 0x7FFF
    toward_zero = apply("cvt.rz.f16.f32 %o, %a;", "f16", ("f32", a))
    assert toward_zero[3:5].tolist() == [65504, 65504] and toward_zero[15] == 65504 and toward_zero[5] == 0
    np.testing.assert_array_equal(apply("cvt.f32.f16 %o, %a;", "f32", ("f16", found)), found.astype(np.float32))
    np.testing.assert_array_equal(
        apply("cvt.rn.f16.s32 %o, %a;", "f16", ("s32", [5, 2049, 70000])), np.float16([5, 2048, INF])
    )


def test_bfloat16() -> None:
    a = np.float32([1.0, 1.00390625, 1.01171875, -1.0, 3.3895314e38, 3.4e38, NAN, INF, 1e-40])
    rounded = [0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x7F7F, 0x7F80, 0x7FFF, 0x7F80, 0x0001]
    assert apply("cvt.rn.bf16.f32 %o, %a;", "bf16", ("f32", a)).tolist() == rounded
    cut = apply("cvt.rz.bf16.f32 %o, %a;", "bf16", ("f32", a)).tolist()
    assert cut[:6] == [0x3F80, 0x3F80, 0x3F81, 0xBF80, 0x7F7F, 0x7F7F]
    np.testing.assert_array_equal(apply("cvt.f32.bf16 %o, %a;", "f32", ("bf16", [0x3F80, 0xC000])), [1, -2])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_two_floats_packed(kind: str) -> None:
    a, b = RNG.normal(size=(2, 40)).astype(np.float32)
    packed = apply(f"cvt.rn.{kind}x2.f32 %o, %a, %b;", f"{kind}x2", ("f32", a), ("f32", b))
    upper, lower = (apply(f"cvt.rn.{kind}.f32 %o, %a;", kind, ("f32", x)).view(np.uint16) for x in (a, b))
    np.testing.assert_array_equal(packed, upper.astype(np.uint32) << 16 | lower)
    relu = apply(f"cvt.rn.relu.{kind}x2.f32 %o, %a, %b;", f"{kind}x2", ("f32", a), ("f32", b))
    expected: Any = np.where(a > 0, upper, 0).astype(np.uint32) << 16 | np.where(b > 0, lower, 0)
    np.testing.assert_array_equal(relu, expected)


def test_float64() -> None:
    a = RNG.normal(size=40)
    np.testing.assert_array_equal(apply("cvt.rn.f32.f64 %o, %a;", "f32", ("f64", a)), a.astype(np.float32))
    np.testing.assert_array_equal(
        apply("cvt.f64.f32 %o, %a;", "f64", ("f32", a)), a.astype(np.float32).astype(np.float64)
    )
    assert apply("cvt.rz.f32.f64 %o, %a;", "f32", ("f64", 1 + 2.0**-24 + 2.0**-40)) == 1
    assert apply("cvt.rp.f32.f64 %o, %a;", "f32", ("f64", 1 + 2.0**-40)) == np.float32(1 + 2.0**-23)
    found = apply("fma.rn.f64 %o, %a, %a, %b;", "f64", ("f64", 1 + 2.0**-52), ("f64", -1 - 2.0**-51))
    assert found == 2.0**-104  # lost by a rounded product
