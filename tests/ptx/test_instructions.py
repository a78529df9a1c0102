"""Single instructions against Python's integers, fractions and NumPy's float64."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ptx import Module, UnknownInstruction
from ptx.forms import DTYPES
from ptx.text import apply, entry, run

RNG = np.random.default_rng(3)
NAN, INF = float("nan"), float("inf")


def integers(kind: str, count: int = 90) -> np.ndarray:
    limits = np.iinfo(DTYPES[kind])
    wide = RNG.integers(limits.min, limits.max, count, DTYPES[kind], endpoint=True)
    small = np.array([0, 1, 2, 3, 7, 100], DTYPES[kind])
    ends = np.array([limits.min, limits.max, limits.min + 1], DTYPES[kind])
    return RNG.permutation(np.concatenate([wide, small, ends, small]))


def wrapped(values: list[int], kind: str) -> np.ndarray:
    dtype = DTYPES[kind]
    return np.array([value % (1 << 8 * dtype.itemsize) for value in values], f"u{dtype.itemsize}").view(dtype)


def toward_zero(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


INTEGER_RULES: dict[str, Any] = {
    "add": lambda a, b, c, w: a + b,
    "sub": lambda a, b, c, w: a - b,
    "mul.lo": lambda a, b, c, w: a * b,
    "mul.hi": lambda a, b, c, w: (a * b) >> w,
    "mad.lo": lambda a, b, c, w: a * b + c,
    "mad.hi": lambda a, b, c, w: ((a * b) >> w) + c,
    "div": lambda a, b, c, w: toward_zero(a, b),
    "rem": lambda a, b, c, w: a - b * toward_zero(a, b),
    "min": lambda a, b, c, w: min(a, b),
    "max": lambda a, b, c, w: max(a, b),
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", INTEGER_RULES)
def test_integer_arithmetic(name: str, kind: str) -> None:
    a, b, c = integers(kind), integers(kind), integers(kind)
    if name in ("div", "rem"):
        b[b == 0] = 5
    has_third = name.startswith("mad")
    found = apply(
        f"{name}.{kind} %o, %a, %b{', %c' * has_third};", kind, (kind, a), (kind, b), *[(kind, c)] * has_third
    )
    rule, width = INTEGER_RULES[name], int(kind[1:])
    expected = [rule(int(x), int(y), int(z), width) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(found, wrapped(expected, kind))


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products(kind: str) -> None:
    a, b = integers(kind), integers(kind)
    wide = f"{kind[0]}{int(kind[1:]) * 2}"
    c = integers(wide)
    exact = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(
        apply(f"mul.wide.{kind} %o, %a, %b;", wide, (kind, a), (kind, b)), wrapped(exact, wide)
    )
    found = apply(f"mad.wide.{kind} %o, %a, %b, %c;", wide, (kind, a), (kind, b), (wide, c))
    np.testing.assert_array_equal(found, wrapped([x + int(y) for x, y in zip(exact, c, strict=True)], wide))


def test_carries() -> None:
    a, b = integers("u64"), integers("u64")
    split = ".reg .b32 %x<9>; mov.b64 {%x0, %x1}, %a; mov.b64 {%x2, %x3}, %b;"
    total = apply(
        f"{split} add.cc.u32 %x4, %x0, %x2; addc.u32 %x5, %x1, %x3; mov.b64 %o, {{%x4, %x5}};",
        "u64",
        ("u64", a),
        ("u64", b),
    )
    np.testing.assert_array_equal(total, a + b)
    total = apply(
        f"{split} sub.cc.u32 %x4, %x0, %x2; subc.u32 %x5, %x1, %x3; mov.b64 %o, {{%x4, %x5}};",
        "u64",
        ("u64", a),
        ("u64", b),
    )
    np.testing.assert_array_equal(total, a - b)
    code = "mad.lo.cc.u32 %x4, %x0, %x2, %x3; madc.hi.u32 %x5, %x0, %x2, 0; mov.b64 %o, {%x4, %x5};"
    total = apply(split + code, "u64", ("u64", a), ("u64", b))
    low, high = a & np.uint64(0xFFFFFFFF), b & np.uint64(0xFFFFFFFF)
    np.testing.assert_array_equal(total, low * high + (b >> np.uint64(32)))


def test_saturated_sums() -> None:
    a, b = integers("s32"), integers("s32")
    exact = a.astype(np.int64) + b
    np.testing.assert_array_equal(
        apply("add.sat.s32 %o, %a, %b;", "s32", ("s32", a), ("s32", b)), exact.clip(-(2**31), 2**31 - 1)
    )


@pytest.mark.parametrize("kind", ["s16", "s32", "s64", "b16", "b32", "b64", "u32"])
def test_shifts_by_more_than_the_width(kind: str) -> None:
    a, width = integers(kind), int(kind[1:])
    by = RNG.integers(0, 80, len(a)).astype(np.uint32)
    by[:6] = [0, width - 1, width, width + 1, 2**31, 2**32 - 1]
    if kind[0] != "u" and kind[0] != "s":
        expected = [int(x) << int(n) if n < width else 0 for x, n in zip(a, by, strict=True)]
        np.testing.assert_array_equal(
            apply(f"shl.{kind} %o, %a, %b;", kind, (kind, a), ("u32", by)), wrapped(expected, kind)
        )
    expected = [int(x) >> min(int(n), 64) for x, n in zip(a, by, strict=True)]
    np.testing.assert_array_equal(
        apply(f"shr.{kind} %o, %a, %b;", kind, (kind, a), ("u32", by)), wrapped(expected, kind)
    )


def test_funnel_shifts() -> None:
    a, b = integers("u32"), integers("u32")
    by = RNG.integers(0, 70, len(a)).astype(np.uint32)
    for how, amount in (("wrap", [int(n) & 31 for n in by]), ("clamp", [min(int(n), 32) for n in by])):
        both = [int(y) << 32 | int(x) for x, y in zip(a, b, strict=True)]
        left = [(v << n) >> 32 for v, n in zip(both, amount, strict=True)]
        right = [v >> n for v, n in zip(both, amount, strict=True)]
        inputs = ("u32", a), ("u32", b), ("u32", by)
        np.testing.assert_array_equal(apply(f"shf.l.{how}.b32 %o, %a, %b, %c;", "u32", *inputs), wrapped(left, "u32"))
        np.testing.assert_array_equal(apply(f"shf.r.{how}.b32 %o, %a, %b, %c;", "u32", *inputs), wrapped(right, "u32"))


def extract(value: int, start: int, length: int, width: int, signed: bool) -> int:
    """bfe, bit by bit as the manual's pseudocode has it."""
    top = start + length - 1 if start + length - 1 < width else width - 1
    sign = 0 if not signed or length == 0 else value >> top & 1
    result = 0
    for i in range(width):
        bit = value >> (i + start) & 1 if i < length and i + start < width else sign
        result |= bit << i
    return result


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind: str) -> None:
    a, width = integers(kind, 150), int(kind[1:])
    b = integers(kind, 150)
    start, length = RNG.integers(0, 70, len(a)), RNG.integers(0, 70, len(a))
    bits = [int(x) % 2**width for x in a]
    expected = [extract(x, int(s), int(n), width, kind[0] == "s") for x, s, n in zip(bits, start, length, strict=True)]
    inputs = (kind, a), ("u32", start), ("u32", length)
    np.testing.assert_array_equal(apply(f"bfe.{kind} %o, %a, %b, %c;", kind, *inputs), wrapped(expected, kind))
    inserted = []
    for x, y, s, n in zip(bits, b, start.tolist(), length.tolist(), strict=True):
        value = int(y) % 2**width
        for i in range(n):
            if s + i < width:
                value = value & ~(1 << (s + i)) | (x >> i & 1) << (s + i)
        inserted.append(value)
    inputs = (kind, a), (kind, b), ("u32", start), ("u32", length)
    np.testing.assert_array_equal(apply(f"bfi.b{width} %o, %a, %b, %c, %d;", kind, *inputs), wrapped(inserted, kind))


@pytest.mark.parametrize("width", [32, 64])
def test_bit_counts(width: int) -> None:
    a = integers(f"u{width}")
    texts = [f"{int(x):0{width}b}" for x in a]
    rules = {
        f"popc.b{width}": [text.count("1") for text in texts],
        f"clz.b{width}": [len(text) - len(text.lstrip("0")) for text in texts],
        f"bfind.u{width}": [len(text.lstrip("0")) - 1 for text in texts],
    }
    for name, expected in rules.items():
        np.testing.assert_array_equal(apply(f"{name} %o, %a;", "u32", (f"u{width}", a)), wrapped(expected, "u32"), name)
    found = apply(f"brev.b{width} %o, %a;", f"u{width}", (f"u{width}", a))
    np.testing.assert_array_equal(found, np.array([int(text[::-1], 2) for text in texts], np.uint64))


def test_prmt_and_lop3() -> None:
    a, b, c = integers("u32"), integers("u32"), integers("u32")
    expected = []
    for x, y, select in zip(a, b, c, strict=True):
        octets = int(x).to_bytes(4, "little") + int(y).to_bytes(4, "little")
        picked = [int(select) >> 4 * i & 15 for i in range(4)]
        chosen = [(0xFF if octets[n & 7] & 0x80 else 0) if n & 8 else octets[n & 7] for n in picked]
        expected.append(int.from_bytes(bytes(chosen), "little"))
    inputs = ("u32", a), ("u32", b), ("u32", c)
    np.testing.assert_array_equal(apply("prmt.b32 %o, %a, %b, %c;", "u32", *inputs), wrapped(expected, "u32"))
    for table, rule in ((0xCA, (a & b) | (~a & c)), (0x96, a ^ b ^ c), (0xE8, (a & b) | (a & c) | (b & c))):
        np.testing.assert_array_equal(apply(f"lop3.b32 %o, %a, %b, %c, {table:#x};", "u32", *inputs), rule)


def nearest32(exact: Fraction, rounding: str = "rn") -> np.float32:
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-INF)), guess, np.nextafter(guess, np.float32(INF))]
    if rounding == "rm" or (rounding == "rz" and exact > 0):
        return max(x for x in around if Fraction(float(x)) <= exact)
    if rounding in ("rp", "rz"):
        return min(x for x in around if Fraction(float(x)) >= exact)
    even = {x: int(x.view(np.uint32)) & 1 for x in around}
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), even[x]))


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_float_arithmetic_is_rounded_once(rounding: str) -> None:
    a, b, c = (RNG.normal(size=150).astype(np.float32) for _ in range(3))
    # A product and a sum whose float64 falls on the midpoint of two float32, though the exact sum
    # doesn't.
    a[:3], b[:3], c[:3] = 1 + 2**-12, [1 + 2**-12, 1 + 2**-12, 2**-12 + 1], [2**-60, -(2**-60), 2**-24]
    a[3], b[3], c[3] = 2**-30, 2**-30, 1 + 2**-23
    rules = {
        "add": lambda x, y, z: x + y,
        "sub": lambda x, y, z: x - y,
        "mul": lambda x, y, z: x * y,
        "fma": lambda x, y, z: x * y + z,
    }
    for name, rule in rules.items():
        given = [("f32", a), ("f32", b), ("f32", c)][: 3 if name == "fma" else 2]
        found = apply(f"{name}.{rounding}.f32 %o, %a, %b{', %c' * (name == 'fma')};", "f32", *given)
        exact = [rule(*(Fraction(float(v)) for v in values)) for values in zip(a, b, c, strict=True)]
        np.testing.assert_array_equal(found, np.array([nearest32(x, rounding) for x in exact]), name)


def test_flushing_subnormal_numbers() -> None:
    tiny = np.float32(1e-40)
    a = np.array([tiny, -tiny, 2.0**-126, tiny, 1.0], np.float32)
    b = np.array([1.0, 1.0, 0.5, tiny, tiny], np.float32)
    assert apply("mul.f32 %o, %a, %b;", "f32", ("f32", a), ("f32", b))[:3].all()
    product = apply("mul.ftz.f32 %o, %a, %b;", "f32", ("f32", a), ("f32", b))
    np.testing.assert_array_equal(product, np.zeros(5, np.float32))
    np.testing.assert_array_equal(np.signbit(product), [False, True, False, False, False])
    np.testing.assert_array_equal(
        apply("add.ftz.f32 %o, %a, %b;", "f32", ("f32", a), ("f32", b)), np.float32([1, 1, 0.5, 0, 1])
    )
    np.testing.assert_array_equal(
        apply("ex2.approx.ftz.f32 %o, %a;", "f32", ("f32", [tiny, -126.5])), np.float32([1, 0])
    )
    assert apply("setp.gt.ftz.f32 %o, %a, %b;", "pred", ("f32", tiny), ("f32", 0.0)).tolist() == [False]
    # What only copies a number, or the sign, keeps it; a flushing copy doesn't.
    assert apply("mov.f32 %o, %a;", "f32", ("f32", tiny)) == tiny
    assert apply("neg.f32 %o, %a;", "f32", ("f32", tiny)) == -tiny
    assert apply("neg.ftz.f32 %o, %a;", "f32", ("f32", tiny)) == 0


@pytest.mark.parametrize(
    "code",
    [
        "mov.f32 %x, %a;",
        "mov.f32 %y, %a; mov.f32 %x, %y;",
        "mul.ftz.f32 %x, %a, %a; mov.b64 %rd20, {%a, %a}; mov.b64 {%y, %x}, %rd20;",
        "mov.f32 %x, 0f00080000;",
        "setp.eq.f32 %p1, %a, %a; selp.f32 %x, %a, 0f3F800000, %p1;",
        "mul.f32 %x, %a, 0f3F800000;",
        "mov.b32 %r1, %a; mov.b32 %x, %r1;",
        "shfl.sync.idx.b32 %r1|%p1, %r51, 0, 31, -1; mov.f32 %x, %a;",
    ],
)
def test_subnormal_operands_are_flushed_wherever_they_come_from(code: str) -> None:
    """2**-130 times 2**20 would be a normal number."""
    declared = (
        ".reg .f32 %x; .reg .f32 %y; mul.ftz.f32 %y, %a, %a;"
        if "mov.f32 %y" not in code
        else ".reg .f32 %x; .reg .f32 %y;"
    )
    found = apply(f"{declared} {code} mul.ftz.f32 %o, %x, 0f49800000;", "f32", ("f32", [2.0**-130] * 32))
    np.testing.assert_array_equal(found, np.zeros(32, np.float32))


def test_nan_and_signed_zeros() -> None:
    a, b = np.float32([NAN, 1, NAN, -0.0, 0.0, 3]), np.float32([2, NAN, NAN, 0.0, -0.0, 5])
    low, high = (apply(f"{name}.f32 %o, %a, %b;", "f32", ("f32", a), ("f32", b)) for name in ("min", "max"))
    np.testing.assert_array_equal(low, np.float32([2, 1, NAN, 0, 0, 3]))
    np.testing.assert_array_equal(high, np.float32([2, 1, NAN, 0, 0, 5]))
    assert np.signbit(low[3:5]).all() and not np.signbit(high[3:5]).any()
    assert np.isnan(apply("max.NaN.f32 %o, %a, %b;", "f32", ("f32", a), ("f32", b))[:3]).all()
    assert apply("max.f32 %o, %a, %b, %c;", "f32", ("f32", 1), ("f32", 9), ("f32", 4)) == 9
    # Arithmetic gives one NaN: code that rounds a float's bits meets it.
    total = apply("add.f32 %o, %a, %b;", "f32", ("f32", a), ("f32", b))
    assert total[:3].view(np.uint32).tolist() == [0x7FFFFFFF] * 3
    assert apply("sub.ftz.f32 %o, %a, %a;", "f32", ("f32", INF)).view(np.uint32) == 0x7FFFFFFF


def test_approximations() -> None:
    a = np.float32([0.5, 1.0, 3.0, 100.0, 1e-3])
    rules = {
        "ex2.approx": np.exp2,
        "lg2.approx": np.log2,
        "rcp.approx": lambda x: 1 / x,
        "sqrt.rn": np.sqrt,
        "rsqrt.approx": lambda x: x**-0.5,
    }
    for name, rule in rules.items():
        found = apply(f"{name}.ftz.f32 %o, %a;", "f32", ("f32", a))
        np.testing.assert_array_equal(found, rule(a.astype(np.float64)).astype(np.float32), name)
    np.testing.assert_array_equal(
        apply("ex2.approx.ftz.f32 %o, %a;", "f32", ("f32", [-INF, INF, -200.0])), np.float32([0, INF, 0])
    )
    np.testing.assert_array_equal(
        apply("lg2.approx.ftz.f32 %o, %a;", "f32", ("f32", [0.0, -1.0])), np.float32([-INF, NAN])
    )
    huge = np.float32(2.0**127)
    assert apply("div.approx.f32 %o, %a, %b;", "f32", ("f32", huge), ("f32", huge)) == 0  # as the manual says
    assert apply("div.full.f32 %o, %a, %b;", "f32", ("f32", huge), ("f32", huge)) == 1


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sixteen_bit_arithmetic(kind: str) -> None:
    def widen(bits: np.ndarray) -> np.ndarray:
        return (
            bits.view(np.float16).astype(np.float64)
            if kind == "f16"
            else (bits.astype(np.uint32) << 16).view(np.float32)
        )

    dtype = DTYPES[kind]
    a, b = (narrow(RNG.normal(size=64).astype(np.float32), kind).view(dtype) for _ in range(2))
    for name, rule in {"add": np.add, "mul": np.multiply, "max": np.maximum}.items():
        found = apply(f"{name}.{kind} %o, %a, %b;", kind, (kind, a), (kind, b))
        expected = rule(widen(a), widen(b)).astype(np.float32)
        np.testing.assert_array_equal(found.view(np.uint16), narrow(expected, kind), name)


def narrow(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 to bits of float16 or bfloat16, to nearest even."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize(
    "text",
    ["frobnicate.b32 %r1, %r2;", "add.rq.f32 %f1, %f2, %f3;", "add.f8 %f1, %f2, %f3;", "ld.global.u32 %r1, %r2;"],
)
def test_what_is_not_known_is_refused_when_parsed(text: str) -> None:
    with pytest.raises(UnknownInstruction, match="line"):
        Module(entry("bra $END;\n" + text + "\n$END:"))


@pytest.mark.parametrize(
    "text",
    [
        "call.uni (retval0), f, (param0);",
        "mov.u32 %r1, %clock;",
        "mov.u32 %r1, nothing;",
        "bra $NOWHERE;",
        "add.s32 %r1, %r2;",
        "add.s64 %rd1, %r1, %rd2;",
        "add.f32 %f1, %f2, 1;",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1,%r2}, {%r1,%r2,%r3,%r4}, {%r1,%r2}, {%r1,%r2};",
        "setp.eq.f32 %r1, %f1, %f2;",
        "cp.async.cg.shared.global [%r1], [%rd1], 8;",
        "ld.global.v4.u32 {%r1, %r2}, [%rd1];",
    ],
)
def test_wrong_forms_are_refused_when_parsed(text: str) -> None:
    with pytest.raises(UnknownInstruction):
        Module(entry(text))


def test_registers_narrower_than_the_type() -> None:
    with pytest.raises(UnknownInstruction, match="narrower"):
        Module(entry("add.s32 %r1, %h1, %r2;"))


def test_packed_moves_and_widths() -> None:
    a = integers("u64")
    np.testing.assert_array_equal(
        apply("mov.b64 {%r1, %r2}, %a; mov.b64 %o, {%r2, %r1};", "u64", ("u64", a)),
        a << np.uint64(32) | a >> np.uint64(32),
    )
    a = integers("u32")
    np.testing.assert_array_equal(apply("mov.b32 {_, %h1}, %a; cvt.u32.u16 %o, %h1;", "u32", ("u32", a)), a >> 16)
    octets = integers("u8")
    np.testing.assert_array_equal(apply("cvt.s32.s8 %o, %a;", "s32", ("u8", octets)), octets.view(np.int8))
    signed = octets.view(np.int8).copy()
    out = np.zeros(len(signed), np.int64)
    body = "cvt.u64.u32 %rd3, %r0; add.s64 %rd4, %rd0, %rd3; ld.global.s8 %rd5, [%rd4]; shl.b64 %rd3, %rd3, 3; add.s64 %rd4, %rd1, %rd3; st.global.u64 [%rd4], %rd5;"
    run(entry(body, "a b"), [signed, out], block=len(signed))
    np.testing.assert_array_equal(out, signed)
