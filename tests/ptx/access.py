"""ld, st, atom and red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .forms import DTYPES, Form, Plan, Step, handles
from .operands import Address, Immediate, Register, Sink, Symbol, Vector
from .parse import WIDTHS, Instruction

SHARED_WINDOW, LOCAL_WINDOW = 1 << 56, 1 << 57
WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}
_SPACES = ("global", "shared", "local", "const", "param")
_STATES = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel")
_HINTS = (
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "cta", "gpu", "cluster", "sys", "mmio"),
    *("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"),
    *("L2::evict_first", "L2::evict_last", "L2::evict_normal", "L2::64B", "L2::128B", "L2::256B"),
)


def addresses_of(machine: Any, address: Address) -> Callable[[Any], np.ndarray]:
    """lanes (None: all) -> int64 addresses."""
    if isinstance(address.base, Register):
        base, offset = machine.read(address.base, f"u{8 * WIDTHS[address.base.type]}"), address.offset
    else:
        value = address.base.value if isinstance(address.base, Immediate) else machine.symbol(address.base)
        base, offset = np.full(machine.num_lanes, value, np.int64), address.offset

    is_short = base.itemsize == 4

    def run(lanes: Any) -> np.ndarray:
        own = base if lanes is None else base[lanes]
        total = np.add(own, offset, dtype=np.int64, casting="unsafe")
        return total & 0xFFFFFFFF if is_short else total

    return run


def _space(instruction: Instruction, form: Form) -> str:
    space = form.one_of(*_SPACES, "shared::cta", "param::entry", default="generic")
    return space.split("::")[0]


def _check_address(instruction: Instruction, operand: Any, space: str) -> Address:
    if not isinstance(operand, Address) or not isinstance(operand.base, Register | Symbol | Immediate):
        raise instruction.unknown("address")
    if isinstance(operand.base, Register) and WIDTHS[operand.base.type] < (4 if space in ("shared", "local") else 8):
        raise instruction.unknown("address register")
    return operand


class _Generic:
    """Addresses of no named space: windows for shared and local memory, the rest is global."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine

    def _groups(self, lanes: Any, addresses: np.ndarray) -> list[tuple[Any, int, np.ndarray]]:
        window = addresses & (SHARED_WINDOW | LOCAL_WINDOW)
        spaces = {
            0: self.machine.space("global"),
            SHARED_WINDOW: self.machine.space("shared"),
            LOCAL_WINDOW: self.machine.space("local"),
        }
        return [(spaces[each], each, np.flatnonzero(window == each)) for each in np.unique(window).tolist()]

    def load(
        self, site: Any, lanes: Any, addresses: np.ndarray, dtype: np.dtype, vector: int, **options: bool
    ) -> np.ndarray:
        shape = (len(addresses),) if vector == 1 else (len(addresses), vector)
        result = np.empty(shape, dtype)
        for space, window, chosen in self._groups(lanes, addresses):
            own = chosen if lanes is None else lanes[chosen]
            result[chosen] = space.load(site, own, addresses[chosen] - window, dtype, vector, **options)
        return result

    def store(
        self,
        site: Any,
        lanes: Any,
        addresses: np.ndarray,
        values: np.ndarray,
        dtype: np.dtype,
        vector: int,
        **options: bool,
    ) -> None:
        for space, window, chosen in self._groups(lanes, addresses):
            own = chosen if lanes is None else lanes[chosen]
            space.store(site, own, addresses[chosen] - window, values[chosen], dtype, vector, **options)

    def atomic(self, site: Any, lanes: Any, addresses: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        groups = self._groups(lanes, addresses)
        if len(groups) != 1:
            raise site.machine.unsupported(site, "one atomic on several state spaces")
        space, window, _ = groups[0]
        return space.atomic(site, lanes, addresses - window, dtype)


def space_of(machine: Any, name: str) -> Any:
    return _Generic(machine) if name == "generic" else machine.space("global" if name == "const" else name)


def _shape(form: Form) -> tuple[int, bool, bool]:
    states = [name for name in _STATES if form.flag(name)]
    form.ignore(*_HINTS)
    is_constant = form.flag("nc")
    vector = int(form.one_of("v2", "v4", "v8", default="v1")[1:])
    return vector, any(name != "weak" for name in states), is_constant


@handles("ld", "ldu", is_pure=False)
def _ld(instruction: Instruction) -> Plan:
    form = Form(instruction)
    space = _space(instruction, form)
    vector, is_shared, is_constant = _shape(form)
    kind = form.type()
    dst, source = form.done(2)
    address = _check_address(instruction, source, space)
    registers = form.registers(dst, vector)
    if kind == "pred" or any(isinstance(r, Register) and WIDTHS[r.type] < WIDTHS[kind] for r in registers):
        raise instruction.unknown("destination")
    if space == "param":
        return _ld_param(instruction, registers, kind, address)
    dtype = DTYPES[kind]

    def plan(machine: Any) -> Step:
        site, where, memory = machine.site(instruction), addresses_of(machine, address), space_of(machine, space)
        places = [(i, machine.place(item, kind)) for i, item in enumerate(registers) if not isinstance(item, Sink)]

        def run(lanes: Any) -> None:
            values = memory.load(site, lanes, where(lanes), dtype, vector, is_shared=is_shared, is_constant=is_constant)
            chosen = slice(None) if lanes is None else lanes
            for i, place in places:
                place[chosen] = values if vector == 1 else values[:, i]

        return (lambda: run(None)), _with_lanes(run)

    return plan


def _with_lanes(run: Callable[[Any], Any]) -> Callable[[np.ndarray], Any]:
    def masked(mask: np.ndarray) -> None:
        lanes = np.flatnonzero(mask)
        if len(lanes):
            run(lanes)

    return masked


def _ld_param(instruction: Instruction, registers: list[Any], kind: str, address: Address) -> Plan:
    if not isinstance(address.base, Symbol):
        raise instruction.unknown("parameter address")

    def plan(machine: Any) -> Step:
        begin = machine.parameter(address.base.name) + address.offset
        values = machine.parameter_bytes[begin : begin + WIDTHS[kind] * len(registers)].view(DTYPES[kind])
        places = [
            (values[i : i + 1], machine.place(r, kind)) for i, r in enumerate(registers) if not isinstance(r, Sink)
        ]

        def full() -> None:
            for value, place in places:
                np.copyto(place, value)

        def masked(mask: np.ndarray) -> None:
            for value, place in places:
                np.copyto(place, value, where=mask)

        return full, masked

    return plan


@handles("st", is_pure=False)
def _st(instruction: Instruction) -> Plan:
    form = Form(instruction)
    space = _space(instruction, form)
    vector, is_shared, is_constant = _shape(form)
    kind = form.type()
    target, source = form.done(2)
    address = _check_address(instruction, target, space)
    items = list(source.items) if isinstance(source, Vector) else [source]
    if len(items) != vector or is_constant or kind == "pred" or space in ("const", "param"):
        raise instruction.unknown("form")
    for item in items:
        if not isinstance(item, Register | Immediate) or (
            isinstance(item, Register) and WIDTHS[item.type] < WIDTHS[kind]
        ):
            raise instruction.unknown("source")
    dtype = DTYPES[kind]

    def plan(machine: Any) -> Step:
        site, where, memory = machine.site(instruction), addresses_of(machine, address), space_of(machine, space)
        arrays = [machine.read(item, kind) for item in items]

        def run(lanes: Any) -> None:
            own = arrays if lanes is None else [array[lanes] for array in arrays]
            values = own[0] if vector == 1 else np.stack(own, axis=1)
            memory.store(site, lanes, where(lanes), values, dtype, vector, is_shared=is_shared)

        return (lambda: run(None)), _with_lanes(run)

    return plan


def _wrap_up(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(old >= b, 0, old + 1).astype(old.dtype)


def _wrap_down(old: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > b), b, old - 1).astype(old.dtype)


_OPERATIONS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, b: b,
    "inc": _wrap_up,
    "dec": _wrap_down,
}


@handles("atom", "red", is_pure=False)
def _atom(instruction: Instruction) -> Plan:
    form = Form(instruction)
    space = _space(instruction, form)
    form.ignore(*_STATES, *_HINTS)
    name = form.one_of(*_OPERATIONS, "cas")
    is_flushed = form.flag("noftz") and False
    kind = form.type("b32", "b64", "u32", "s32", "u64", "s64", "f32", "f64")
    operands = form.done()
    has_result = instruction.head == "atom"
    dst = operands[0] if has_result else Sink()
    target, *values = operands[1:] if has_result else operands
    if len(values) != (2 if name == "cas" else 1) or is_flushed or space not in ("global", "shared", "generic"):
        raise instruction.unknown("form")
    address = _check_address(instruction, target, space)
    dtype = DTYPES[kind]

    def apply(old: np.ndarray, given: list[np.ndarray]) -> np.ndarray:
        if name == "cas":
            return np.where(old == given[0], given[1], old)
        return _OPERATIONS[name](old, given[0])

    def plan(machine: Any) -> Step:
        site, where, memory = machine.site(instruction), addresses_of(machine, address), space_of(machine, space)
        arrays = [machine.read(item, kind) for item in values]
        place = None if isinstance(dst, Sink) else machine.place(dst, kind)

        def run(lanes: Any) -> None:
            view, index = memory.atomic(site, lanes, where(lanes), dtype)
            given = arrays if lanes is None else [array[lanes] for array in arrays]
            old = view[index]
            if len(np.unique(index)) == len(index):
                view[index] = apply(old, given)
            else:
                for i, each in enumerate(index.tolist()):  # one thread after the other
                    old[i] = view[each]
                    view[each] = apply(old[i : i + 1], [array[i : i + 1] for array in given])[0]
            if place is not None:
                place[slice(None) if lanes is None else lanes] = old

        return (lambda: run(None)), _with_lanes(run)

    return plan
