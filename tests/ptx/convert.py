"""cvt and cvta."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .floats import NAN, flush, round_bf16, round_directed, widen_bf16
from .forms import DTYPES, Form, Plan, elementwise, handles
from .parse import WIDTHS, Instruction

_SCALARS = ("f16", "bf16", "f32", "f64")
_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_INTEGERS = tuple(f"{letter}{bits}" for letter in "us" for bits in (8, 16, 32, 64))


@handles("cvt")
def _cvt(instruction: Instruction) -> Plan:
    form = Form(instruction)
    rounding = form.one_of("rn", "rz", "rm", "rp", *_TO_INTEGER, default="")
    is_flushed, is_saturated, is_relu = form.flag("ftz"), form.flag("sat"), form.flag("relu")
    to = form.type("f16x2", "bf16x2", *_SCALARS, *_INTEGERS)
    source_kind = form.type(*_SCALARS, *_INTEGERS)
    operands = form.done(3 if to.endswith("x2") else 2)
    if to.endswith("x2"):
        if source_kind != "f32" or rounding not in ("rn", "rz") or is_flushed or is_saturated:
            raise instruction.unknown("form")
        return _packed(instruction, operands, to[:-2], rounding, is_relu)
    convert = _conversion(instruction, to, source_kind, rounding, is_flushed, is_saturated)
    if is_relu and to not in ("f16", "bf16"):
        raise instruction.unknown("modifier .relu")

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        if is_relu:
            return lambda: convert(_relu(arrays[0]), out)
        if to in _INTEGERS and source_kind in _INTEGERS and not is_saturated:
            return partial(np.copyto, out, arrays[0], "unsafe")
        return partial(convert, arrays[0], out)

    return elementwise(instruction, operands[0], to, [(operands[1], source_kind)], build)


def _relu(values: np.ndarray) -> np.ndarray:
    """Below zero is zero; NaN stays."""
    return np.where(values < 0, np.float32(0), values + np.float32(0))


def _conversion(
    instruction: Instruction, to: str, source: str, rounding: str, is_flushed: bool, is_saturated: bool
) -> Any:
    from_float, to_float = source in _SCALARS, to in _SCALARS
    if not from_float and not to_float:
        if rounding or is_flushed:
            raise instruction.unknown("form")
        return partial(_integer_to_integer, is_saturated)
    if not from_float:
        if rounding not in ("rn", "rz", "rm", "rp"):
            raise instruction.unknown("rounding")
        return lambda a, out: (
            _narrow(a.astype(np.longdouble), to, rounding, out) if rounding != "rn" else _from_integer(a, to, out)
        )
    if not to_float:
        if rounding not in _TO_INTEGER:
            raise instruction.unknown("rounding")
        return partial(_float_to_integer, source, to, _TO_INTEGER[rounding], is_flushed)
    narrows = WIDTHS[to] < WIDTHS[source] or {to, source} == {"f16", "bf16"}
    if narrows and rounding not in ("rn", "rz", "rm", "rp"):
        raise instruction.unknown("rounding")
    if not narrows and rounding and rounding not in (_TO_INTEGER if to == source else ("rn",)):
        raise instruction.unknown("rounding")
    return partial(_float_to_float, source, to, rounding, is_flushed, is_saturated)


def _integer_to_integer(is_saturated: bool, a: np.ndarray, out: np.ndarray) -> None:
    if is_saturated:
        limits = np.iinfo(out.dtype)
        low = max(limits.min, int(np.iinfo(a.dtype).min))
        high = min(limits.max, int(np.iinfo(a.dtype).max))
        a = np.clip(a, a.dtype.type(low), a.dtype.type(high))
    np.copyto(out, a, "unsafe")


def _from_integer(a: np.ndarray, to: str, out: np.ndarray) -> None:
    if to == "bf16":
        _narrow(a.astype(np.longdouble), to, "rn", out)
    else:
        np.copyto(out, a, "unsafe")


def _wide(a: np.ndarray, kind: str) -> np.ndarray:
    return widen_bf16(a) if kind == "bf16" else a


def _float_to_integer(source: str, to: str, rounding: Any, is_flushed: bool, a: np.ndarray, out: np.ndarray) -> None:
    values = _wide(a, source)
    if is_flushed and source == "f32":
        values = flush(values)
    whole = rounding(values.astype(np.float64))
    limits = np.iinfo(out.dtype)
    above = whole >= float(limits.max)  # 2**63, as 2**63 - 1 is no float64
    inside = np.where(above | (whole <= limits.min) | np.isnan(whole), 0, whole)
    result = inside.astype(out.dtype)
    result[above] = limits.max
    result[whole <= limits.min] = limits.min
    is_wide = source == "f64" or to in ("s64", "u64")
    invalid = (1 << (limits.bits - 1)) if is_wide else 0
    result.view(f"u{out.itemsize}")[np.isnan(whole)] = invalid
    np.copyto(out, result)


def _float_to_float(
    source: str, to: str, rounding: str, is_flushed: bool, is_saturated: bool, a: np.ndarray, out: np.ndarray
) -> None:
    values = _wide(a, source)
    if is_flushed and source == "f32":
        values = flush(values)
    if rounding in _TO_INTEGER:
        values = _TO_INTEGER[rounding](values)
    if is_saturated:
        values = np.where(np.isnan(values), 0, np.clip(values, 0, 1)).astype(values.dtype)
    _narrow(values, to, rounding, out)
    if is_flushed and to == "f32":
        np.copyto(out, flush(out))


def _narrow(values: np.ndarray, to: str, rounding: str, out: np.ndarray) -> None:
    """Rounds to the type `to`, in any direction; NaN becomes the GPU's."""
    if to == "bf16":
        if values.dtype == np.float32 and rounding in ("rn", "rz"):
            np.copyto(out, round_bf16(np.ascontiguousarray(values), rounding == "rz"))
            return
        # Truncated to a float32 with a sticky last bit, which the second rounding heeds.
        short = values.astype(np.float32)
        bits = round_directed(values, short, "rz").view(np.uint32)
        inexact = bits.view(np.float32).astype(np.longdouble) != values.astype(np.longdouble)
        sticky = (bits | inexact.astype(np.uint32)).view(np.float32)
        np.copyto(out, round_bf16(sticky, rounding == "rz"))
        return
    result = values.astype(DTYPES[to])
    if rounding in ("rz", "rm", "rp"):
        result = round_directed(values, result, rounding)
    is_nan = np.isnan(result)
    if is_nan.any():
        result[is_nan] = NAN if to == "f32" else np.nan
        if to == "f16":
            result.view(np.uint16)[is_nan] = 0x7FFF
    np.copyto(out, result)


def _packed(instruction: Instruction, operands: list[Any], to: str, rounding: str, is_relu: bool) -> Plan:
    """cvt.rn.f16x2.f32 d, a, b: a goes to the upper half."""
    dst, upper, lower = operands

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        halves = out.view(np.uint16).reshape(-1, 2)
        place = np.empty(len(out), DTYPES[to])

        def run() -> None:
            for i, array in enumerate(reversed(arrays)):
                _narrow(_relu(array) if is_relu else array, to, rounding, place)
                halves[:, i] = place.view(np.uint16)

        return run

    return elementwise(instruction, dst, "b32", [(upper, "f32"), (lower, "f32")], build)


@handles("cvta")
def _cvta(instruction: Instruction) -> Plan:
    form = Form(instruction)
    is_to = form.flag("to")
    space = form.one_of("global", "shared", "local", "const", "param")
    form.ignore("::cta")
    kind = form.type("u64")
    dst, source = form.done(2)

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        window = np.uint64(machine.windows.get(space, 0))
        return partial(np.subtract if is_to else np.add, arrays[0], window, out)

    build.is_ufunc = True  # type: ignore[attr-defined]
    return elementwise(instruction, dst, kind, [(source, kind)], build)
