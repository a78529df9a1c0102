"""Comparisons and choices."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import INTEGERS
from .floats import FLOATS, flush, widen_bf16
from .forms import DTYPES, Form, Plan, Step, elementwise, handles
from .operands import Negated, Pair, Register, Sink
from .parse import WIDTHS, Instruction

_ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_UNORDERED = {f"{name}u": function for name, function in _ORDERED.items()}
_JOINS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_BITS = ("b16", "b32", "b64")


def _unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


def _comparison(instruction: Instruction, name: str, kind: str, is_flushed: bool) -> Any:
    """compare(machine, a, b operands) -> a function filling a bool array from two arrays."""
    is_float = kind in FLOATS
    if not is_float:
        allowed = (
            {"eq": np.equal, "ne": np.not_equal} if kind in _BITS else _ORDERED | (_UNSIGNED if kind[0] == "u" else {})
        )
        if name not in allowed or is_flushed:
            raise instruction.unknown("comparison")
        return lambda a, b, out: allowed[name](a, b, out)
    if name in _UNSIGNED or (is_flushed and kind != "f32"):
        raise instruction.unknown("comparison")

    def run(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        if kind == "bf16":
            a, b = widen_bf16(a), widen_bf16(b)
        if is_flushed:
            a, b = flush(a), flush(b)
        if name in _ORDERED:
            _ORDERED[name](a, b, out)
            if name == "ne":  # only unordered comparisons hold for NaN
                out &= ~_unordered(a, b)
        elif name in _UNORDERED:
            _UNORDERED[name](a, b, out)
            out |= _unordered(a, b)
        else:
            np.copyto(out, ~_unordered(a, b) if name == "num" else _unordered(a, b))

    return run


def _parts(form: Form) -> tuple[str, str, bool]:
    name = form.one_of(*_ORDERED, *_UNSIGNED, *_UNORDERED, "num", "nan")
    join = form.one_of(*_JOINS, default="")
    return name, join, form.flag("ftz")


@handles("setp")
def _setp(instruction: Instruction) -> Plan:
    form = Form(instruction)
    name, join, is_flushed = _parts(form)
    kind = form.type(*_BITS, *INTEGERS, "f16", "bf16", "f32", "f64")
    dst, a, b, *third = form.done(4 if join else 3)
    compare = _comparison(instruction, name, kind, is_flushed)
    targets = [dst.first, dst.second] if isinstance(dst, Pair) else [dst]
    is_negated = bool(third) and isinstance(third[0], Negated)
    for item in targets:
        if not (isinstance(item, Sink) or (isinstance(item, Register) and item.type == "pred")):
            raise instruction.unknown("destination")
    for item in (a, b):
        if isinstance(item, Register) and WIDTHS[item.type] < WIDTHS[kind]:
            raise instruction.unknown("operand width")

    def plan(machine: Any) -> Step:
        x, y = machine.read(a, kind), machine.read(b, kind)
        places = [machine.place(item, "pred") for item in targets]
        if len(places) == 1 and not join and kind not in FLOATS:
            place, out = places[0], machine.scratch("pred")

            def alone(mask: np.ndarray) -> None:
                compare(x, y, out)
                np.copyto(place, out, where=mask)

            return (lambda: compare(x, y, place)), alone
        given = machine.read(third[0].register if is_negated else third[0], "pred") if join else None
        out, other = machine.scratch("pred"), machine.scratch("pred", "other")

        def results() -> list[np.ndarray]:
            compare(x, y, out)
            values = [out] if len(places) == 1 else [out, np.logical_not(out, other)]
            if given is not None:
                c = ~given if is_negated else given.copy()
                for value in values:
                    _JOINS[join](value, c, value)
            return values

        def full() -> None:
            for place, value in zip(places, results(), strict=True):
                place[:] = value

        def masked(mask: np.ndarray) -> None:
            for place, value in zip(places, results(), strict=True):
                np.copyto(place, value, where=mask)

        return full, masked

    return plan


@handles("set")
def _set(instruction: Instruction) -> Plan:
    form = Form(instruction)
    name, join, is_flushed = _parts(form)
    dst_kind = form.type("u32", "s32", "f32")
    kind = form.type(*_BITS, *INTEGERS, "f16", "bf16", "f32", "f64")
    dst, a, b, *third = form.done(4 if join else 3)
    compare = _comparison(instruction, name, kind, is_flushed)
    if third and not isinstance(third[0], Register):
        raise instruction.unknown("operand")
    true = DTYPES[dst_kind].type(1) if dst_kind == "f32" else np.array(-1).astype(DTYPES[dst_kind])[()]

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        def run() -> None:
            result = np.empty(len(out), bool)
            compare(arrays[0], arrays[1], result)
            if join:
                _JOINS[join](result, arrays[2], result)
            np.copyto(out, np.where(result, true, DTYPES[dst_kind].type(0)))

        return run

    return elementwise(instruction, dst, dst_kind, [(a, kind), (b, kind), *((item, "pred") for item in third)], build)


@handles("selp")
def _selp(instruction: Instruction) -> Plan:
    form = Form(instruction)
    kind = form.type(*_BITS, *INTEGERS, "f16", "bf16", "f32", "f64")
    dst, a, b, chosen = form.done(4)
    if not (isinstance(chosen, Register) and chosen.type == "pred"):
        raise instruction.unknown("predicate")

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        x, y, c = arrays

        def run() -> None:
            np.copyto(out, y)
            np.copyto(out, x, where=c)

        return run

    return elementwise(instruction, dst, kind, [(a, kind), (b, kind), (chosen, "pred")], build)


@handles("slct")
def _slct(instruction: Instruction) -> Plan:
    form = Form(instruction)
    is_flushed = form.flag("ftz")
    kind = form.type(*_BITS, *INTEGERS, "f32", "f64")
    sign_kind = form.type("s32", "f32")
    dst, a, b, sign = form.done(4)

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        def run() -> None:
            x, y, c = arrays
            np.copyto(out, np.where((flush(c) if is_flushed else c) >= 0, x, y))

        return run

    return elementwise(instruction, dst, kind, [(a, kind), (b, kind), (sign, sign_kind)], build)
