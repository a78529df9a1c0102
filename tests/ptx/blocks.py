"""Basic blocks: instructions bound to a machine, and where control goes after them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .faults import Fault
from .forms import PURE
from .operands import Symbol
from .parse import Instruction

JUMPS = ("bra", "ret", "exit", "trap", "brkpt")


def waits(instruction: Instruction) -> bool:
    """For a whole block, unlike bar.warp.sync."""
    return instruction.head in ("bar", "barrier") and not instruction.opcode.startswith("bar.warp")


class BasicBlock:
    def __init__(self, number: int) -> None:
        self.number = number
        self.full: list[Any] = []
        self.masked: list[Any] = []
        # Lanes that have exited may run what only touches registers.
        self.mixed: list[tuple[Any, bool]] = []
        self.last: Instruction = None  # type: ignore[assignment]
        self.target = -1
        self.wait: Any = None
        self.guard: np.ndarray | None = None
        self.is_negated = False
        self.runs = 0  # warps that executed it
        self.instructions: list[Instruction] = []

    def add(self, instruction: Instruction, full: Any, masked: Any) -> None:
        self.full.append(full)
        self.masked.append(masked)
        is_pure = instruction.head in PURE
        self.mixed.append((full, False) if is_pure else (masked, True))

    def successors(self, num_blocks: int) -> list[int]:
        """Blocks that control may go to, the one that follows in the text last."""
        head, is_sure = self.last.head, self.guard is None
        places = [self.target] if head == "bra" else []
        if head not in JUMPS or not is_sure:
            places.append(self.number + 1)
        return [place for place in places if place < num_blocks]

    def execute(self, machine: Any, mask: np.ndarray) -> None:
        count = int(np.count_nonzero(mask))
        if count == machine.num_lanes:
            self.runs += count // 32
            for step in self.full:
                step()
            return
        self.runs += int(np.count_nonzero(mask.reshape(-1, 32).any(axis=1)))
        if count == machine.num_alive:
            for step, needs_mask in self.mixed:
                if needs_mask:
                    step(mask)
                else:
                    step()
            return
        for step in self.masked:
            step(mask)

    def leave(self, machine: Any, mask: np.ndarray, waiting: dict[int, np.ndarray], barriers: Any) -> None:
        head, is_wait = self.last.head, waits(self.last)
        if head not in JUMPS and not is_wait:
            _join(waiting, self.number + 1, mask)
            return
        taken, rest = self._parted(mask)
        if rest is not None:
            _join(waiting, self.number + 1, rest)
        if taken is None:
            return
        if head == "bra":
            _join(waiting, self.target, taken)
        elif is_wait:
            barriers.wait(self, taken, waiting)
        elif head in ("ret", "exit"):
            machine.exit(taken)
            barriers.release(waiting)
        else:
            raise machine.site(self.last).fault(Fault, np.flatnonzero(taken), 0, "the program stops itself")

    def _parted(self, mask: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Who goes, who goes on."""
        if self.guard is None:
            return mask, None
        taken = mask & ~self.guard if self.is_negated else mask & self.guard
        count = np.count_nonzero(taken)
        if count == 0:
            return None, mask
        if count == np.count_nonzero(mask):
            return taken, None
        return taken, mask & ~taken


def _join(waiting: dict[int, np.ndarray], number: int, mask: np.ndarray) -> None:
    waiting[number] = waiting[number] | mask if number in waiting else mask


def guarded(guard: np.ndarray, is_negated: bool, full: Any, masked: Any) -> tuple[Any, Any]:
    count, size = np.count_nonzero, len(guard)

    def run(mask: np.ndarray) -> None:
        chosen = mask & ~guard if is_negated else mask & guard
        if count(chosen):
            masked(chosen)

    def all_lanes() -> None:
        true = count(guard)
        if true == (0 if is_negated else size):
            full()
        elif true != (size if is_negated else 0):
            masked(~guard if is_negated else guard.copy())

    return all_lanes, run


def split(machine: Any) -> list[BasicBlock]:
    """The kernel's blocks in order, bound to the machine; one past the end never runs."""
    kernel, plans = machine.kernel, machine.program.plans
    starts = {0, *kernel.labels.values()}
    starts |= {
        i + 1 for i, instruction in enumerate(kernel.instructions) if instruction.head in JUMPS or waits(instruction)
    }
    starts.discard(len(kernel.instructions))
    ordered = sorted(starts)
    number_at = {start: number for number, start in enumerate(ordered)}
    blocks = []
    for number, start in enumerate(ordered):
        end = ordered[number + 1] if number + 1 < len(ordered) else len(kernel.instructions)
        block = BasicBlock(number)
        block.instructions = kernel.instructions[start:end]
        for place in range(start, end):
            instruction = block.last = kernel.instructions[place]
            guard = machine.read(instruction.guard, "pred") if instruction.guard is not None else None
            if instruction.head in JUMPS:
                block.guard, block.is_negated = guard, instruction.is_guard_negated
                if instruction.head == "bra":
                    label = instruction.operands[0]
                    assert isinstance(label, Symbol)
                    block.target = number_at.get(kernel.labels[label.name], len(ordered))
            elif waits(instruction):
                block.guard, block.is_negated = guard, instruction.is_guard_negated
                block.wait = plans[place](machine)
            else:
                full, masked = plans[place](machine)
                if guard is not None:
                    full, masked = guarded(guard, instruction.is_guard_negated, full, masked)
                block.add(instruction, full, masked)
        blocks.append(block)
    return blocks
