"""Logic, shifts and bit fields; moves, also of packed values and addresses."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .forms import DTYPES, Form, Plan, Step, elementwise, handles
from .operands import Immediate, Register, Sink, Special, Symbol, Vector
from .parse import WIDTHS, Instruction

_BITS = ("b16", "b32", "b64")


def _ufunc(function: Any) -> Any:
    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        return partial(function, *arrays, out)

    build.is_ufunc = isinstance(function, np.ufunc)  # type: ignore[attr-defined]
    return build


@handles("and", "or", "xor", "not", "cnot")
def _logic(instruction: Instruction) -> Plan:
    form, head = Form(instruction), instruction.head
    kind = form.type(*_BITS, *(() if head == "cnot" else ("pred",)))
    dst, *sources = form.done(2 if head in ("not", "cnot") else 3)
    if kind == "pred":
        function = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[head]
    else:
        names = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
        function = names.get(head) or (lambda a, out: np.copyto(out, a == 0))
    return elementwise(instruction, dst, kind, [(item, kind) for item in sources], _ufunc(function))


@handles("shl", "shr")
def _shifts(instruction: Instruction) -> Plan:
    """Shifts by more than the width give zeros, or the sign."""
    form = Form(instruction)
    kind = (
        form.type(*_BITS) if instruction.head == "shl" else form.type(*_BITS, "u16", "s16", "u32", "s32", "u64", "s64")
    )
    dst, source, amount = form.done(3)
    width = WIDTHS[kind] * 8
    function = np.left_shift if instruction.head == "shl" else np.right_shift
    dtype = DTYPES[kind]

    def run(a: np.ndarray, by: np.ndarray, out: np.ndarray) -> None:
        if kind[0] == "s":
            function(a, np.minimum(by, width - 1).astype(dtype), out)
        else:
            function(a, np.minimum(by, width - 1).astype(dtype), out)
            np.copyto(out, 0, where=by >= width)

    if isinstance(amount, Immediate) and 0 <= amount.value < width:
        return elementwise(instruction, dst, kind, [(source, kind), (amount, kind)], _ufunc(function))
    return elementwise(instruction, dst, kind, [(source, kind), (amount, "u32")], _ufunc(run))


@handles("shf")
def _funnel(instruction: Instruction) -> Plan:
    form = Form(instruction)
    is_left = form.one_of("l", "r") == "l"
    is_wrapped = form.one_of("wrap", "clamp") == "wrap"
    form.type("b32")
    dst, low, high, amount = form.done(4)

    def run(a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
        by = ((c & 31) if is_wrapped else np.minimum(c, 32)).astype(np.uint64)
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        np.copyto(out, (both << by) >> np.uint64(32) if is_left else both >> by, "unsafe")

    return elementwise(instruction, dst, "b32", [(low, "u32"), (high, "u32"), (amount, "u32")], _ufunc(run))


@handles("bfe")
def _extract(instruction: Instruction) -> Plan:
    form = Form(instruction)
    kind = form.type("u32", "s32", "u64", "s64")
    dst, source, begin, length = form.done(4)
    width, unsigned = WIDTHS[kind] * 8, np.dtype(f"u{WIDTHS[kind]}")

    def run(a: np.ndarray, position: np.ndarray, count: np.ndarray, out: np.ndarray) -> None:
        for lane in range(len(out)):
            start, bits = int(position[lane]) & 255, int(count[lane]) & 255
            value = int(a[lane])  # Python's, of endless sign bits
            if kind[0] == "u":
                field = (value >> start) & ((1 << bits) - 1)
            else:
                top = min(start + bits - 1, width - 1)
                sign = (value >> top) & 1 if bits else 0
                kept = max(0, min(bits, width - start))
                field = ((value & ((1 << width) - 1)) >> start) & ((1 << kept) - 1)
                field -= (1 << kept) if sign and bits else 0
            out.view(unsigned)[lane] = field & ((1 << width) - 1)

    return elementwise(instruction, dst, kind, [(source, kind), (begin, "u32"), (length, "u32")], _ufunc(run))


@handles("bfi")
def _insert(instruction: Instruction) -> Plan:
    form = Form(instruction)
    kind = form.type("b32", "b64")
    dst, field, base, begin, length = form.done(5)
    width, dtype = WIDTHS[kind] * 8, DTYPES[kind]

    def run(a: np.ndarray, b: np.ndarray, position: np.ndarray, count: np.ndarray, out: np.ndarray) -> None:
        start, bits = np.minimum(position & 255, width), np.minimum(count & 255, width)
        begin_mask = np.where(start >= width, 0, _ones(start, width, dtype))
        end = np.minimum(start + bits, width)
        inside = begin_mask & np.where(end >= width, ~dtype.type(0), ~_ones(end, width, dtype))
        inside = np.where(bits == 0, 0, inside).astype(dtype)
        shifted = np.where(start >= width, 0, a << np.minimum(start, width - 1).astype(dtype)).astype(dtype)
        np.copyto(out, (b & ~inside) | (shifted & inside))

    return elementwise(
        instruction, dst, kind, [(field, kind), (base, kind), (begin, "u32"), (length, "u32")], _ufunc(run)
    )


def _ones(start: np.ndarray, width: int, dtype: np.dtype) -> np.ndarray:
    """Ones from bit start on."""
    return (~dtype.type(0)) << np.minimum(start, width - 1).astype(dtype)


@handles("prmt")
def _permute(instruction: Instruction) -> Plan:
    form = Form(instruction)
    form.type("b32")
    dst, low, high, selector = form.done(4)

    def run(a: np.ndarray, b: np.ndarray, select: np.ndarray, out: np.ndarray) -> None:
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        result = np.zeros(len(out), np.uint32)
        for i in range(4):
            nibble = (select >> np.uint32(4 * i)) & np.uint32(15)
            byte = ((both >> (8 * (nibble & 7)).astype(np.uint64)) & np.uint64(255)).astype(np.uint32)
            signs = np.where(byte & 128, np.uint32(255), np.uint32(0))
            result |= np.where(nibble & 8, signs, byte) << np.uint32(8 * i)
        np.copyto(out, result)

    return elementwise(instruction, dst, "b32", [(low, "u32"), (high, "u32"), (selector, "u32")], _ufunc(run))


@handles("lop3")
def _logic3(instruction: Instruction) -> Plan:
    form = Form(instruction)
    form.type("b32")
    dst, a, b, c, table = form.done(5)
    if not isinstance(table, Immediate):
        raise instruction.unknown("table")

    def run(x: np.ndarray, y: np.ndarray, z: np.ndarray, out: np.ndarray) -> None:
        result = np.zeros(len(out), np.uint32)
        for i in range(8):
            if table.value >> i & 1:
                result |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        np.copyto(out, result)

    return elementwise(instruction, dst, "b32", [(item, "u32") for item in (a, b, c)], _ufunc(run))


@handles("popc", "clz", "brev", "bfind")
def _counts(instruction: Instruction) -> Plan:
    form, head = Form(instruction), instruction.head
    by_shift = form.flag("shiftamt") if head == "bfind" else False
    kind = form.type("b32", "b64") if head != "bfind" else form.type("u32", "s32", "u64", "s64")
    dst, source = form.done(2)
    width, dtype = WIDTHS[kind] * 8, np.dtype(f"u{WIDTHS[kind]}")

    def run(a: np.ndarray, out: np.ndarray) -> None:
        value = np.ascontiguousarray(a).view(dtype)
        if head == "bfind" and kind[0] == "s":
            value = np.where(a < 0, ~value, value)
        octets = value.astype(dtype.newbyteorder(">")).view(np.uint8).reshape(len(a), -1)
        digits = np.unpackbits(octets, axis=1)  # the highest bit first
        if head == "popc":
            np.copyto(out, digits.sum(axis=1), "unsafe")
        elif head == "brev":
            packed = np.packbits(digits[:, ::-1], axis=1)
            np.copyto(out, packed.copy().view(dtype.newbyteorder(">"))[:, 0], "unsafe")
        else:
            leading = np.where(value == 0, width, digits.argmax(axis=1))
            if head == "bfind":
                leading = np.where(value == 0, 0xFFFFFFFF, leading if by_shift else width - 1 - leading)
            np.copyto(out, leading, "unsafe")

    return elementwise(instruction, dst, kind if head == "brev" else "u32", [(source, kind)], _ufunc(run))


@handles("mov")
def _mov(instruction: Instruction) -> Plan:
    form = Form(instruction)
    kind = form.type()
    dst, source = form.done(2)
    if isinstance(dst, Vector):
        return _unpack(instruction, form, kind, dst, source)
    if isinstance(source, Vector):
        return _pack(instruction, form, kind, dst, source)
    if not isinstance(source, Register | Immediate | Special | Symbol):
        raise instruction.unknown("source")

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        return partial(np.copyto, out, arrays[0])

    build.is_ufunc = True  # type: ignore[attr-defined]
    return elementwise(instruction, dst, kind, [(source, kind)], build)


def _pieces(instruction: Instruction, form: Form, kind: str, packed: Vector) -> tuple[list[Any], str]:
    items = form.registers(packed) if packed is instruction.operands[0] else list(packed.items)
    if WIDTHS[kind] % len(items):
        raise instruction.unknown("vector")
    return items, f"b{WIDTHS[kind] * 8 // len(items)}"


def _pack(instruction: Instruction, form: Form, kind: str, dst: Any, source: Vector) -> Plan:
    items, piece = _pieces(instruction, form, kind, source)

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        parts = out.view(DTYPES[piece]).reshape(len(out), -1)

        def run() -> None:
            for i, array in enumerate(arrays):
                parts[:, i] = array

        return run

    return elementwise(instruction, dst, kind, [(item, piece) for item in items], build)


def _unpack(instruction: Instruction, form: Form, kind: str, dst: Vector, source: Any) -> Plan:
    items, piece = _pieces(instruction, form, kind, dst)
    if not isinstance(source, Register) or WIDTHS[source.type] != WIDTHS[kind]:
        raise instruction.unknown("source")

    def plan(machine: Any) -> Step:
        whole = machine.read(source, kind)
        places = [(i, machine.place(item, piece)) for i, item in enumerate(items) if not isinstance(item, Sink)]
        parts = whole.view(DTYPES[piece]).reshape(len(whole), -1)

        def full() -> None:
            for i, place in places:
                place[:] = parts[:, i]

        def masked(mask: np.ndarray) -> None:
            for i, place in places:
                np.copyto(place, parts[:, i], where=mask)

        return full, masked

    return plan
