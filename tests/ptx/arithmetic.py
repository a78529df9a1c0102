"""Arithmetic on integers and floats: opcodes and their forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from . import floats
from .carry import carry_plan
from .floats import FLOATS, Function, float_plan
from .forms import DTYPES, Form, Plan, elementwise, handles
from .parse import Instruction

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")


def _integer_plan(instruction: Instruction, kind: str, function: Any, dst_kind: str | None = None) -> Plan:
    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Function:
        return partial(function, *arrays, out=out)

    build.is_ufunc = isinstance(function, np.ufunc)  # type: ignore[attr-defined]
    dst, *sources = instruction.operands
    return elementwise(instruction, dst, dst_kind or kind, [(item, kind) for item in sources], build)


def divide(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Toward zero."""
    np.floor_divide(a - np.fmod(a, b), b, out=out)


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product, of whatever width and sign."""
    bits = a.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.itemsize * 2}")
        return ((a.astype(wide) * b.astype(wide)) >> bits).astype(a.dtype)
    low_mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    a0, a1, b0, b1 = ua & low_mask, ua >> half, ub & low_mask, ub >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    other = (middle & low_mask) + a0 * b1
    high = a1 * b1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, ub, 0).astype(np.uint64) - np.where(b < 0, ua, 0).astype(np.uint64)
    return high.view(a.dtype)


def _saturated(function: Any, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, np.clip(function(a.astype(np.int64), b), -(2**31), 2**31 - 1), "unsafe")


@handles("addc", "subc", "madc")
def _with_carry(instruction: Instruction) -> Plan:
    return carry_plan(instruction)


@handles("add", "sub", "mul", "mad", "fma")
def _sums(instruction: Instruction) -> Plan:
    if "cc" in instruction.opcode.split("."):
        return carry_plan(instruction)
    form, head = Form(instruction), instruction.head
    part = form.one_of("lo", "hi", "wide", default="")
    is_flushed, is_saturated = form.flag("ftz"), form.flag("sat")
    rounding = form.one_of("rn", "rz", "rm", "rp", default="rn")
    kind = form.type(*FLOATS, *(INTEGERS if head != "fma" else ()))
    form.done(4 if head in ("mad", "fma") else 3)
    if kind in FLOATS:
        if part or ((is_saturated or rounding != "rn") and kind != "f32"):
            raise instruction.unknown("form")
        if rounding != "rn":
            return float_plan(instruction, kind, floats.directed(head, rounding), is_flushed, is_saturated)
        function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": floats.fma, "fma": floats.fma}[head]
        return float_plan(instruction, kind, function, is_flushed, is_saturated)
    if is_flushed or (head in ("mul", "mad")) != bool(part):
        raise instruction.unknown("form")
    if is_saturated:
        if kind != "s32" or head not in ("add", "sub"):
            raise instruction.unknown("form")
        return _integer_plan(instruction, kind, partial(_saturated, np.add if head == "add" else np.subtract))
    if head in ("add", "sub") or (head == "mul" and part == "lo"):
        return _integer_plan(instruction, kind, {"add": np.add, "sub": np.subtract, "mul": np.multiply}[head])
    return _products(instruction, kind, head, part)


def _products(instruction: Instruction, kind: str, head: str, part: str) -> Plan:
    dst, a, b, *rest = instruction.operands
    wide = f"{kind[0]}{int(kind[1:]) * 2}" if part == "wide" else kind
    if part == "wide" and kind.endswith("64"):
        raise instruction.unknown("form")

    def function(x: np.ndarray, y: np.ndarray, *z: np.ndarray) -> None:
        *addend, out = z
        if part == "wide":
            product = np.multiply(x, y, dtype=DTYPES[wide])
        else:
            product = x * y if part == "lo" else high_product(np.ascontiguousarray(x), np.ascontiguousarray(y))
        if addend:
            np.add(product, addend[0], out)
        else:
            np.copyto(out, product)

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Function:
        if part == "wide" and not rest:
            return partial(np.multiply, *arrays, out, dtype=DTYPES[wide])
        return partial(function, *arrays, out)

    return elementwise(instruction, dst, wide, [(a, kind), (b, kind), *((item, wide) for item in rest)], build)


@handles("div", "rem")
def _quotients(instruction: Instruction) -> Plan:
    form = Form(instruction)
    how = form.one_of("approx", "full", "rn", default="")
    is_flushed = form.flag("ftz")
    kind = form.type("f32", "f64", *INTEGERS) if instruction.head == "div" else form.type(*INTEGERS)
    form.done(3)
    if kind in FLOATS:
        if not how or (kind == "f64" and (how != "rn" or is_flushed)):
            raise instruction.unknown("form")
        return float_plan(instruction, kind, floats.approximate_division if how == "approx" else np.divide, is_flushed)
    if how or is_flushed:
        raise instruction.unknown("form")
    return _integer_plan(instruction, kind, divide if instruction.head == "div" else np.fmod)


@handles("min", "max")
def _extremes(instruction: Instruction) -> Plan:
    form = Form(instruction)
    is_flushed, spreads_nan = form.flag("ftz"), form.flag("NaN")
    kind = form.type(*FLOATS, *INTEGERS)
    operands = form.done(3, 4) if kind == "f32" else form.done(3)
    is_min = instruction.head == "min"
    if kind not in FLOATS:
        if is_flushed or spreads_nan:
            raise instruction.unknown("form")
        return _integer_plan(instruction, kind, np.minimum if is_min else np.maximum)
    two = floats.minimum if is_min else floats.maximum
    if spreads_nan:
        two = floats.spreading_nan(two)

    def three(a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
        first = np.empty_like(out)
        two(a, b, first)
        two(first, c, out)

    return float_plan(instruction, kind, two if len(operands) == 3 else three, is_flushed)


@handles("abs", "neg")
def _signs(instruction: Instruction) -> Plan:
    form = Form(instruction)
    is_flushed = form.flag("ftz")
    kind = form.type(*FLOATS, "s16", "s32", "s64")
    dst, source = form.done(2)
    if kind not in FLOATS:
        return _integer_plan(instruction, kind, np.negative if instruction.head == "neg" else np.absolute)
    if kind == "f32" and is_flushed:
        return float_plan(instruction, kind, np.negative if instruction.head == "neg" else np.absolute, True)
    # Without a flush they only touch the sign bit.
    width = {"f16": 16, "bf16": 16, "f64": 64}.get(kind, 32)
    signs = (0x80008000 if kind.endswith("x2") else 1 << (width - 1)) & ((1 << width) - 1)
    bits = DTYPES[f"u{width}"].type(signs)

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Function:
        if instruction.head == "neg":
            return partial(np.bitwise_xor, arrays[0], bits, out)
        return partial(np.bitwise_and, arrays[0], ~bits, out)

    return elementwise(instruction, dst, f"b{width}", [(source, f"b{width}")], build)


_APPROXIMATE = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
}


@handles(*_APPROXIMATE)
def _functions(instruction: Instruction) -> Plan:
    form, head = Form(instruction), instruction.head
    how = form.one_of("approx", "rn") if head in ("rcp", "sqrt") else form.one_of("approx")
    is_flushed = form.flag("ftz")
    kind = form.type("f32", *(("f64",) if how == "rn" else ()), *(FLOATS[:4] if head in ("ex2", "tanh") else ()))
    form.done(2)
    return float_plan(instruction, kind, floats.through_float64(_APPROXIMATE[head]), is_flushed and kind == "f32")


@handles("copysign")
def _copysign(instruction: Instruction) -> Plan:
    """copysign d, a, b: the sign of a, the rest of b."""
    form = Form(instruction)
    kind = form.type("f32", "f64")
    dst, a, b = form.done(3)
    bits = kind.replace("f", "b")
    sign = DTYPES[bits].type(1 << (int(kind[1:]) - 1))

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Function:
        return lambda: np.copyto(out, (arrays[0] & sign) | (arrays[1] & ~sign))

    return elementwise(instruction, dst, bits, [(a, bits), (b, bits)], build)


@handles("testp")
def _classes(instruction: Instruction) -> Plan:
    form = Form(instruction)
    which = form.one_of("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    kind = form.type("f32", "f64")
    dst, source = form.done(2)
    tiny = np.finfo(DTYPES[kind]).tiny
    tests = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda x: (np.abs(x) < tiny) & (x != 0),
    }

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Function:
        return lambda: np.copyto(out, tests[which](arrays[0]))

    return elementwise(instruction, dst, "pred", [(source, kind)], build)
