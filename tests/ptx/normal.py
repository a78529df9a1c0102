"""Which float32 registers can never hold subnormal numbers, so that flushing them can be left
out."""

from __future__ import annotations

from typing import Any

from .operands import Immediate, Pair, Register, Vector
from .parse import Instruction

_INTEGER = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")


def normal_registers(instructions: list[Instruction]) -> set[str]:
    """Registers that only flushing instructions write, or copies of such."""
    normal: set[str] = set()
    dirty: set[str] = set()
    copies: list[tuple[str, list[Any]]] = []
    for instruction in instructions:
        if not instruction.operands:
            continue
        target = instruction.operands[0]
        if isinstance(target, Register):
            if instruction.head in ("mov", "selp"):
                last = 2 if instruction.head == "mov" else 3
                copies.append((target.name, instruction.operands[1:last]))
            else:
                (normal if _flushes(instruction) else dirty).add(target.name)
        elif isinstance(target, Vector | Pair):
            items = target.items if isinstance(target, Vector) else (target.first, target.second)
            dirty |= {item.name for item in items if isinstance(item, Register)}
    possible = (normal | {name for name, _ in copies}) - dirty
    while wrong := {name for name, sources in copies if name in possible and not _all_normal(sources, possible)}:
        possible -= wrong
    return possible


def _flushes(instruction: Instruction) -> bool:
    head, *parts = instruction.opcode.split(".")
    if head in ("set", "setp"):
        return False
    if head == "cvt":
        return len(parts) > 1 and parts[-2] == "f32" and ("ftz" in parts or parts[-1] in _INTEGER)
    return "ftz" in parts and parts[-1] == "f32"


def _all_normal(operands: list[Any], registers: set[str]) -> bool:
    return all(is_normal(operand, registers) for operand in operands)


def is_normal(operand: Any, registers: set[str]) -> bool:
    if isinstance(operand, Immediate):
        value = operand.value & 0x7FFFFFFF
        return operand.float_bytes == 4 and (value == 0 or value >= 0x800000)
    return isinstance(operand, Register) and operand.name in registers
