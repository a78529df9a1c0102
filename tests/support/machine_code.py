"""Readers of the assembly that LLVM makes."""

from __future__ import annotations

import re
from collections.abc import Iterator

VECTOR = re.compile(r"%(?:[xyz]|t)mm\d+")


def inner_loops(assembly: str) -> Iterator[list[str]]:
    """Basic blocks that jump to their own beginning."""
    label, block = "", []
    for line in assembly.splitlines():
        text = line.split("#")[0].strip()
        if text.endswith(":"):
            label, block = text[:-1], []
        elif text and not text.startswith(".p2align"):
            block.append(text)
            if text.startswith("j") and text.split()[-1] == label:
                yield block
                block = []


def pieces(assembly: str) -> Iterator[list[str]]:
    """Stretches of code without a jump: instructions between labels, jumps and calls."""
    piece: list[str] = []
    for line in assembly.splitlines():
        text = line.split("#")[0].strip()
        if text.endswith(":") or text.startswith(("j", "call", "ret")):
            yield piece
            piece = []
        elif text and not text.startswith("."):
            piece.append(text)
