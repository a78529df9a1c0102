"""How an instruction is written: its modifiers, taken one by one, and the table of what handles
which opcode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .operands import Register, Sink, Vector
from .parse import WIDTHS, Instruction

# A plan is made when the text is parsed; called with the machine it gives the instruction's two
# forms: for all lanes, and under a mask.
Step = tuple[Callable[[], Any], Callable[[np.ndarray], Any]]
Plan = Callable[[Any], Step]

HANDLERS: dict[str, Callable[[Instruction], Plan]] = {}
# Instructions that only read and write registers: what they do in lanes that have exited doesn't
# matter.
PURE: set[str] = set()

DTYPES: dict[str, Any] = {
    **{f"u{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"b{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "bf16": np.dtype("u2")},
    **{"f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"), "f32x2": np.dtype("u8"), "pred": np.dtype("?")},
}


def handles(*opcodes: str, is_pure: bool = True) -> Callable[[Callable[[Instruction], Plan]], Any]:
    def register(handler: Callable[[Instruction], Plan]) -> Callable[[Instruction], Plan]:
        for opcode in opcodes:
            HANDLERS[opcode] = handler
            if is_pure:
                PURE.add(opcode)
        return handler

    return register


class Form:
    """The modifiers of one instruction. Whatever is left when it is done is unknown."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.left = instruction.opcode.split(".")[1:]

    def flag(self, name: str) -> bool:
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def ignore(self, *names: str) -> None:
        self.left = [item for item in self.left if item not in names]

    def one_of(self, *names: str, default: str | None = None) -> str:
        for name in names:
            if self.flag(name):
                return name
        if default is None:
            raise self.instruction.unknown(f"none of .{', .'.join(names)}")
        return default

    def type(self, *allowed: str) -> str:
        """The next type, from the left."""
        for item in self.left:
            if item in WIDTHS:
                if allowed and item not in allowed:
                    raise self.instruction.unknown(f"type .{item}")
                self.left.remove(item)
                return item
        raise self.instruction.unknown("no type")

    def done(self, *operand_counts: int) -> list[Any]:
        """The operands, whose number must be one of those given."""
        if self.left:
            raise self.instruction.unknown(f"modifier .{self.left[0]}")
        operands = self.instruction.operands
        if operand_counts and len(operands) not in operand_counts:
            raise self.instruction.unknown(f"{len(operands)} operands")
        return operands

    def registers(self, operand: Any, *counts: int) -> list[Any]:
        """The registers (or sinks) of {a, b, ...}, or of a single one."""
        items = list(operand.items) if isinstance(operand, Vector) else [operand]
        if counts and len(items) not in counts:
            raise self.instruction.unknown(f"{len(items)} registers")
        if not all(isinstance(item, Register | Sink) for item in items):
            raise self.instruction.unknown("not a register")
        return items


def elementwise(instruction: Instruction, dst: Any, dst_type: str, sources: list[tuple[Any, str]], build: Any) -> Plan:
    """A plan for `dst = f(sources)`, lane by lane; build(machine, arrays, out) gives the callable
    that fills out.

    Ufuncs are told by `build.is_ufunc`: they may write to an array that they read.
    """
    for operand, kind in [(dst, dst_type), *sources]:
        if isinstance(operand, Register) and WIDTHS[operand.type] < WIDTHS[kind]:
            raise instruction.unknown(f"{operand.name} is narrower than .{kind}")
    if not isinstance(dst, Register | Sink):
        raise instruction.unknown("destination")

    def plan(machine: Any) -> Step:
        arrays = [machine.read(operand, kind) for operand, kind in sources]
        out = machine.scratch(dst_type)
        into = build(machine, arrays, out)
        if isinstance(dst, Sink):
            return into, lambda mask: into()
        place = machine.place(dst, dst_type)
        copy = np.copyto

        def masked(mask: np.ndarray) -> None:
            into()
            copy(place, out, "unsafe", mask)

        is_own = place.dtype == out.dtype and (
            getattr(build, "is_ufunc", False) or all(dst != item for item, _ in sources)
        )
        if is_own:
            return build(machine, arrays, place), masked

        def full() -> None:
            into()
            copy(place, out, "unsafe")

        return full, masked

    return plan
