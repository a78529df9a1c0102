"""Arithmetic on integers and floats.

float32 is computed in float32; fma in float64 and rounded once more (which differs from one rounding only where the
float64 sum falls on a float32 midpoint, about once in 2**29). Approximations are the exact values, rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from .forms import DTYPES, Form, Plan, elementwise, handles
from .operands import Immediate, Register
from .parse import Instruction

TINY = np.float32(2.0**-126)
NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")
INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
Function = Callable[..., None]


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_bf16(values: np.ndarray, toward_zero: bool = False) -> np.ndarray:
    bits = values.view(np.uint32)
    bits = bits if toward_zero else bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)
    return np.where(np.isnan(values), 0x7FFF, bits >> 16).astype(np.uint16)


def flush(values: np.ndarray) -> np.ndarray:
    """Subnormal numbers made zeros of their sign."""
    return np.where(np.abs(values) < TINY, values * np.float32(0), values)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
    if out.dtype != np.float64:
        product = np.multiply(a, b, dtype=np.float64)
        product += c
        np.copyto(out, product, "unsafe")
        return
    for lane in range(len(out)):
        values = (float(a[lane]), float(b[lane]), float(c[lane]))
        if np.isfinite(values).all():
            exact = Fraction(values[0]) * Fraction(values[1]) + Fraction(values[2])
            # Zeros need their sign, and what overflows its infinity.
            big = abs(exact) >= Fraction(2) ** 1024
            out[lane] = values[0] * values[1] + values[2] if exact == 0 or big else float(exact)
        else:
            out[lane] = values[0] * values[1] + values[2]


def _extreme(function: Any, combine: Any, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """fmin and fmax, with -0 below +0."""
    same = a == b
    bits = np.dtype(f"u{out.itemsize}")
    both = combine(a.view(bits), b.view(bits))
    function(a, b, out)
    np.copyto(out.view(bits), both, where=same)


_min = partial(_extreme, np.fmin, np.bitwise_or)
_max = partial(_extreme, np.fmax, np.bitwise_and)


def _nan_extreme(function: Any, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    has_nan = np.isnan(a) | np.isnan(b)
    function(a, b, out)
    out[has_nan] = np.nan


def _unary64(function: Any) -> Function:
    def run(a: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, function(a.astype(np.float64)), "unsafe")

    return run


def _approximate_division(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Divisors over 2**126 give 0, or NaN for infinite dividends."""
    huge = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    infinite = np.isinf(a)
    np.divide(a, b, out)
    if huge.any():
        np.copyto(out, np.where(infinite, NAN, np.float32(0)), where=huge)


def _finish(out: np.ndarray, is_flushed: bool, machine: Any) -> Function:
    """Makes every NaN the one that GPUs give, and subnormal results zeros."""
    size, count = out.shape[0], np.count_nonzero
    wide, flags = machine.scratch("f32", "finish"), machine.scratch("pred", "finish")
    if is_flushed:

        def run() -> None:
            np.absolute(out, wide)
            if count(np.greater_equal(wide, TINY, flags)) != size:
                np.multiply(out, 0, out, where=wide < TINY)
                np.copyto(out, NAN, where=wide != wide)

    else:

        def run() -> None:
            if count(np.isnan(out, flags)):
                np.copyto(out, NAN, where=flags)

    return run


def float_plan(
    instruction: Instruction,
    kind: str,
    function: Any,
    is_flushed: bool = False,
    is_saturated: bool = False,
    keeps_nan: bool = False,
) -> Plan:
    """dst = function(*sources) in a float type; packed and 16-bit ones are computed in float32."""
    dst, *sources = instruction.operands
    is_ufunc = isinstance(function, np.ufunc)

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Function:
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return _narrow(machine, kind, function, arrays, out)
        if kind == "f64":
            return partial(function, *arrays, out)
        dirty = [i for i, item in enumerate(sources) if is_flushed and not machine.is_normal(item)]
        main = partial(function, *arrays, out)
        finish = _finish(out, is_flushed, machine)

        def run() -> None:
            if dirty:
                inputs = list(arrays)
                for i in dirty:
                    inputs[i] = flush(arrays[i])
                function(*inputs, out)
            else:
                main()
            if is_saturated:
                np.copyto(out, 0, where=np.isnan(out))
                np.clip(out, 0, 1, out)
            finish()

        return main if keeps_nan and not dirty else run

    build.is_ufunc = is_ufunc  # type: ignore[attr-defined]
    return elementwise(instruction, dst, kind, [(item, kind) for item in sources], build)


def _narrow(machine: Any, kind: str, function: Any, arrays: list[np.ndarray], out: np.ndarray) -> Function:
    is_half = kind.startswith("f16")
    bits = np.uint16 if kind.endswith("x2") else None

    def run() -> None:
        inputs = [array if bits is None else np.ascontiguousarray(array).view(bits) for array in arrays]
        wide = [
            (a.view(np.float16).astype(np.float32) if is_half else widen_bf16(a))
            for a in map(np.ascontiguousarray, inputs)
        ]
        result = np.empty(len(wide[0]), np.float32)
        function(*wide, result)
        if is_half:
            narrow = result.astype(np.float16).view(np.uint16)
            narrow[np.isnan(result)] = 0x7FFF
        else:
            narrow = round_bf16(result)
        np.copyto(out.view(bits or np.uint16), narrow)

    return run


def _integer_plan(instruction: Instruction, kind: str, function: Any, dst_kind: str | None = None) -> Plan:
    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Function:
        return partial(function, *arrays, out)

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


def _rounding(form: Form, kind: str, *allowed: str) -> None:
    """Only rounding to nearest even, which is also what is meant if nothing is written."""
    form.one_of(*(allowed or ("rn",)), default="rn")


@handles("add", "sub", "mul", "mad", "fma")
def _sums(instruction: Instruction) -> Plan:
    form, head = Form(instruction), instruction.head
    part = form.one_of("lo", "hi", "wide", default="")
    is_flushed, is_saturated = form.flag("ftz"), form.flag("sat")
    _rounding(form, "")
    kind = form.type(*FLOATS, *(INTEGERS if head != "fma" else ()))
    form.done(4 if head in ("mad", "fma") else 3)
    if kind in FLOATS:
        if part or (is_saturated and kind != "f32"):
            raise instruction.unknown("form")
        function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": fma, "fma": fma}[head]
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
        return float_plan(instruction, kind, _approximate_division if how == "approx" else np.divide, is_flushed)
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
    two = _min if is_min else _max
    if spreads_nan:
        two = partial(_nan_extreme, two)

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
    return float_plan(instruction, kind, _unary64(_APPROXIMATE[head]), is_flushed and kind == "f32")


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


def normal_registers(instructions: list[Instruction]) -> set[str]:
    """float32 registers that can't hold subnormal numbers: whatever writes them flushes."""
    normal: set[str] = set()
    dirty: set[str] = set()
    copies: list[tuple[str, list[Any]]] = []
    for instruction in instructions:
        head, parts = instruction.head, instruction.opcode.split(".")
        for place, operand in enumerate(instruction.operands):
            written = [operand] if isinstance(operand, Register) else list(getattr(operand, "items", ()))
            written += [getattr(operand, "first", None), getattr(operand, "second", None)]
            for register in written:
                if not isinstance(register, Register) or register.type not in ("f32", "b32"):
                    continue
                if place == 0 and head in ("mov", "selp") and operand is register:
                    copies.append((register.name, instruction.operands[1 : 2 + (head == "selp")]))
                elif place == 0 and ("ftz" in parts and parts[-1] == "f32" and head not in ("set", "setp", "cvt")):
                    normal.add(register.name)
                elif place == 0 and head == "cvt" and parts[-2] == "f32" and ("ftz" in parts or parts[-1][0] in "su"):
                    normal.add(register.name)
                elif place == 0 or head in ("atom",):
                    dirty.add(register.name)
    return _closed(normal, dirty, copies)


def _closed(normal: set[str], dirty: set[str], copies: list[tuple[str, list[Any]]]) -> set[str]:
    possible = (normal | {name for name, _ in copies}) - dirty
    while True:
        wrong = {
            name for name, sources in copies if name in possible and not all(is_normal(s, possible) for s in sources)
        }
        if not wrong:
            return possible
        possible -= wrong


def is_normal(operand: Any, registers: set[str]) -> bool:
    if isinstance(operand, Immediate):
        value = operand.value & 0x7FFFFFFF
        return operand.float_bytes == 4 and (value == 0 or value >= 0x800000)
    if isinstance(operand, Register):
        return operand.type == "pred" or operand.name in registers
    return False
