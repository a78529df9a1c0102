"""Operands of an instruction."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .faults import UnknownInstruction

if TYPE_CHECKING:
    from .parse import Kernel

Scope = dict[str, str]

_SPECIAL = re.compile(
    r"%(?:(?:tid|ntid|ctaid|nctaid)\.[xyz]|laneid|warpid|nwarpid|lanemask_(?:eq|lt|le|gt|ge)|(?:dynamic|total)_smem_size)"
)
_INTEGER = re.compile(r"([+-]?)\s*(0[xX][0-9a-fA-F]+|\d+)U?")
_ADDRESS = re.compile(r"\[\s*([\w$%.]+)\s*(?:((?:[+-]\s*)+)(\w+))?\s*\]")


@dataclass(frozen=True)
class Register:
    name: str
    type: str  # as declared


@dataclass(frozen=True)
class Immediate:
    """An integer, or the bits of a float."""

    value: int
    float_bytes: int = 0  # 4 or 8 if written as a float


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Symbol:
    """A variable's address, a parameter or a label."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    base: Any  # Register, Symbol or Immediate
    offset: int


@dataclass(frozen=True)
class Vector:
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Negated:
    register: Register


@dataclass(frozen=True)
class Pair:
    """d|p: a value and a predicate, or two predicates."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Sink:
    """_: the result is not wanted."""


Operand = Register | Immediate | Special | Symbol | Address | Vector | Negated | Pair | Sink


def split_operands(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def parse_operand(text: str, scopes: list[Scope], kernel: Kernel, line: int) -> Operand:
    text = text.strip()
    if text == "_":
        return Sink()
    for scope in reversed(scopes):
        if text in scope:
            return Register(scope[text], kernel.registers[scope[text]])
    if text.startswith("{") and text.endswith("}"):
        return Vector(tuple(parse_operand(item, scopes, kernel, line) for item in split_operands(text[1:-1])))
    if text.startswith("["):
        return _address(text, scopes, kernel, line)
    if "|" in text:
        return Pair(*(parse_operand(item, scopes, kernel, line) for item in text.split("|", 1)))
    if text.startswith("!"):
        inner = parse_operand(text[1:], scopes, kernel, line)
        if isinstance(inner, Register):
            return Negated(inner)
    if _SPECIAL.fullmatch(text):
        return Special(text[1:])
    if number := _number(text):
        return number
    if text == "WARP_SZ":
        return Immediate(32)
    if re.fullmatch(r"[A-Za-z_$][\w$]*", text):
        return Symbol(text)
    if match := re.fullmatch(r"([A-Za-z_$][\w$]*)\s*\+\s*(\d+)", text):
        return Symbol(match.group(1), int(match.group(2)))
    raise UnknownInstruction(f"line {line}: operand: {text}")


def _number(text: str) -> Immediate | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Immediate(int(text[2:], 16), 4)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16), 8)
    if match := _INTEGER.fullmatch(text):
        value = int(match.group(2), 0) if match.group(2)[:2] in ("0x", "0X") else int(match.group(2))
        return Immediate(-value if match.group(1) == "-" else value)
    if re.fullmatch(r"[+-]?(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?", text):
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 8)
    return None


def _address(text: str, scopes: list[Scope], kernel: Kernel, line: int) -> Address:
    match = _ADDRESS.fullmatch(text)
    if not match:
        raise UnknownInstruction(f"line {line}: address: {text}")
    name, signs, number = match.groups()
    offset = int(number, 0) if number else 0
    return Address(parse_operand(name, scopes, kernel, line), -offset if (signs or "").count("-") % 2 else offset)
