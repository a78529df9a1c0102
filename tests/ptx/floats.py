"""Float arithmetic as GPUs do it: rounding, flushed subnormal numbers, NaN.

Sums, products and fma are rounded once. Approximations are the exact values, rounded: a GPU's may
be off by a few units in the last place. 16-bit types are computed in float32 and rounded again,
which only for fma is not always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from .forms import Plan, elementwise
from .parse import Instruction

TINY = np.float32(2.0**-126)
NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
_BELOW, _MIDPOINT = np.uint64(2**29 - 1), np.uint64(2**28)  # what float64 has below float32's last bit
FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f32x2", "f64")
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
    """One rounding, to the nearest."""
    if out.dtype == np.float64:
        for lane in range(len(out)):
            out[lane] = _fma64(float(a[lane]), float(b[lane]), float(c[lane]))
        return
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    # A sum that falls on the midpoint of two float32 may have been rounded to it.
    is_unsure = total.view(np.uint64) & _BELOW == _MIDPOINT
    if np.count_nonzero(is_unsure):
        total[is_unsure] = _sticky(product[is_unsure], c[is_unsure].astype(np.float64), total[is_unsure])
    np.copyto(out, total, "unsafe")


def _sticky(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """a + b rounded to odd: a later rounding to fewer bits is then as if of the exact sum."""
    back = total - a
    error = (a - (total - back)) + (b - back)
    bits = total.view(np.int64)
    odd = bits + np.where((error > 0) == (total > 0), 1, -1)
    return np.where((error != 0) & (bits & 1 == 0) & np.isfinite(total), odd, bits).view(np.float64)


def directed(head: str, rounding: str) -> Function:
    """Addition, subtraction, multiplication or fma of float32, rounded towards zero, down or up."""

    def run(*arrays: np.ndarray) -> None:
        *inputs, out = arrays
        a, b, *c = (array.astype(np.float64) for array in inputs)
        first, second = {"add": (a, b), "sub": (a, -b), "mul": (a * b, None)}.get(head, (a * b, c[0] if c else None))
        exact = first if second is None else _sticky(first, second, first + second)
        np.copyto(out, round_directed(exact, exact.astype(np.float32), rounding))

    return run


def round_directed(exact: np.ndarray, nearest: np.ndarray, rounding: str) -> np.ndarray:
    """The neighbour of `nearest` on the right side of `exact`: rz, rm (down) or rp (up)."""
    wide = nearest.astype(exact.dtype)
    up, down = nearest.dtype.type(np.inf), nearest.dtype.type(-np.inf)
    too_high, too_low = wide > exact, wide < exact
    if rounding == "rz":
        too_high, too_low = too_high & (exact > 0), too_low & (exact < 0)
    elif rounding == "rm":
        too_low = np.zeros_like(too_low)
    else:
        too_high = np.zeros_like(too_high)
    lower, higher = np.nextafter(nearest, down), np.nextafter(nearest, up)
    return np.where(too_high, lower, np.where(too_low, higher, nearest))


def _fma64(a: float, b: float, c: float) -> float:
    plain = a * b + c
    if not np.isfinite([a, b, c]).all():
        return plain
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    # Zeros need their sign, and what overflows its infinity.
    return plain if exact == 0 or abs(exact) >= Fraction(2) ** 1024 else float(exact)


def _extreme(function: Any, combine: Any, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """fmin and fmax, with -0 below +0."""
    bits = np.dtype(f"u{out.itemsize}")
    same = a == b
    both = combine(a.view(bits), b.view(bits))
    function(a, b, out)
    np.copyto(out.view(bits), both, where=same)


minimum = partial(_extreme, np.fmin, np.bitwise_or)
maximum = partial(_extreme, np.fmax, np.bitwise_and)


def spreading_nan(function: Any) -> Function:
    """The .NaN form of a minimum or maximum."""

    def run(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        has_nan = np.isnan(a) | np.isnan(b)
        function(a, b, out)
        np.copyto(out, np.nan, where=has_nan)

    return run


def through_float64(function: Any) -> Function:
    def run(a: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, function(a.astype(np.float64)), "unsafe")

    return run


def approximate_division(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Divisors over 2**126 give 0, or NaN for infinite dividends."""
    huge = (np.abs(b) > np.float32(2.0**126)) & np.isfinite(b)
    infinite = np.isinf(a)
    np.divide(a, b, out)
    if huge.any():
        np.copyto(out, np.where(infinite, NAN, np.float32(0)), where=huge)


def _finish(out: np.ndarray, is_flushed: bool, machine: Any) -> Function:
    """Makes every NaN the one that GPUs give, and subnormal results zeros."""
    size, count = out.shape[0], np.count_nonzero
    role = "finish" if size == machine.num_lanes else "finish pairs"
    wide, flags = machine.scratch("f32", role, size), machine.scratch("pred", role, size)
    if not is_flushed:

        def canonical() -> None:
            if count(np.isnan(out, flags)):
                np.copyto(out, NAN, where=flags)

        return canonical

    def run() -> None:
        np.absolute(out, wide)
        if count(np.greater_equal(wide, TINY, flags)) != size:
            np.multiply(out, 0, out, where=wide < TINY)
            np.copyto(out, NAN, where=np.isnan(out, flags))

    return run


def float_plan(
    instruction: Instruction, kind: str, function: Any, is_flushed: bool = False, is_saturated: bool = False
) -> Plan:
    """dst = function(*sources, out), in a float type."""
    dst, *sources = instruction.operands
    is_pair = kind == "f32x2"

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Function:
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return _narrow(kind, function, arrays, out)
        if kind == "f64":
            return partial(function, *arrays, out)
        if is_pair:
            arrays, out = [array.view(np.float32) for array in arrays], out.view(np.float32)
        dirty = [i for i, item in enumerate(sources) if is_flushed and (is_pair or not machine.is_normal(item))]
        finish = _finish(out, is_flushed, machine)

        def run() -> None:
            inputs = arrays
            if dirty:
                inputs = list(arrays)
                for i in dirty:
                    inputs[i] = flush(arrays[i])
            function(*inputs, out)
            if is_saturated:
                np.copyto(out, 0, where=np.isnan(out))
                np.clip(out, 0, 1, out)
            finish()

        return run

    build.is_ufunc = isinstance(function, np.ufunc)  # type: ignore[attr-defined]
    bits = "b64" if is_pair else kind
    return elementwise(instruction, dst, bits, [(item, bits) for item in sources], build)


def _narrow(kind: str, function: Any, arrays: list[np.ndarray], out: np.ndarray) -> Function:
    is_half = kind.startswith("f16")

    def wide(array: np.ndarray) -> np.ndarray:
        halves = np.ascontiguousarray(array).view(np.uint16)
        return halves.view(np.float16).astype(np.float32) if is_half else widen_bf16(halves)

    def run() -> None:
        inputs = [wide(array) for array in arrays]
        result = np.empty(len(inputs[0]), np.float32)
        function(*inputs, result)
        if is_half:
            narrow = result.astype(np.float16).view(np.uint16)
            narrow[np.isnan(result)] = 0x7FFF
        else:
            narrow = round_bf16(result)
        np.copyto(out.view(np.uint16), narrow)

    return run
