"""Block-wide barriers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .blocks import JUMPS
from .faults import Deadlock
from .forms import Form, Plan, handles
from .operands import Immediate, Negated, Register, Symbol
from .parse import Instruction
from .warp import warp_barrier, whole_warps


@dataclass
class _Parked:
    block: Any
    mask: np.ndarray


@dataclass
class Wait:
    """What a bar instruction waits for."""

    site: Any
    number: np.ndarray
    count: np.ndarray | None
    is_aligned: bool
    finish: Any  # called with the lanes of a block, once all are there


class Barriers:
    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.parked: list[_Parked] = []
        shape = machine.num_lanes
        self.number = np.full(shape, -1, np.int64)  # by lane: the barrier it waits at
        self.wanted = np.zeros(shape, np.int64)  # by lane: how many threads that takes; 0: all that are left

    @property
    def is_empty(self) -> bool:
        return not self.parked

    def wait(self, block: Any, mask: np.ndarray, waiting: dict[int, np.ndarray]) -> None:
        wait: Wait = block.wait
        if wait.is_aligned:
            whole_warps(self.machine, wait.site, mask)
        self.number[mask] = wait.number[mask]
        self.wanted[mask] = 0 if wait.count is None else wait.count[mask]
        self.parked.append(_Parked(block, mask))
        self.release(waiting)

    def release(self, waiting: dict[int, np.ndarray]) -> None:
        if not self.parked:
            return
        machine = self.machine
        number, wanted = self.number.reshape(machine.num_blocks, -1), self.wanted.reshape(machine.num_blocks, -1)
        alive = machine.alive.reshape(machine.num_blocks, -1)
        for block in range(machine.num_live_blocks):
            for each in np.unique(number[block][number[block] >= 0]).tolist():
                here = number[block] == each
                target = int(wanted[block][here].max())
                if target == 0:
                    if not (alive[block] & ~here).any():
                        self._open(block, here, waiting)
                elif np.count_nonzero(here) == target:
                    self._open(block, here, waiting)

    def _open(self, block: int, here: np.ndarray, waiting: dict[int, np.ndarray]) -> None:
        machine = self.machine
        lanes = np.zeros((machine.num_blocks, machine.lanes_per_block), bool)
        lanes[block] = here
        lanes = lanes.reshape(-1)
        kept = []
        for entry in self.parked:
            leaving = entry.mask & lanes
            if leaving.any():
                if entry.block.wait.finish is not None:
                    entry.block.wait.finish(leaving, lanes)
                following = entry.block.number + 1
                waiting[following] = waiting[following] | leaving if following in waiting else leaving
            staying = entry.mask & ~lanes
            if staying.any():
                kept.append(_Parked(entry.block, staying))
        self.parked = kept
        self.number[lanes] = -1
        if machine.shared.stride:
            machine.shared.races.order_block(block, np.flatnonzero(here.reshape(-1, 32).any(axis=1)))

    def deadlock(self) -> Deadlock:
        entry = self.parked[0]
        lanes = np.flatnonzero(entry.mask)
        places = ", ".join(f"{int(np.count_nonzero(e.mask))} threads at line {e.block.last.line}" for e in self.parked)
        return entry.block.wait.site.fault(Deadlock, lanes, 0, f"all threads that are left wait: {places}")


@handles("bar", "barrier", is_pure=False)
def _bar(instruction: Instruction) -> Plan:
    form = Form(instruction)
    if form.flag("warp"):
        form.one_of("sync")
        (members,) = form.done(1)
        return warp_barrier(instruction, members)
    form.ignore("cta")
    is_aligned = form.flag("aligned") or instruction.head == "bar"
    if form.flag("red"):
        name = form.one_of("popc", "and", "or")
        kind = form.type("u32" if name == "popc" else "pred")
        dst, number, *rest = form.done(3, 4)
        count, source = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0])
    else:
        form.one_of("sync")
        number, *rest = form.done(1, 2)
        name, kind, dst, source, count = "", "", None, None, (rest[0] if rest else None)
    for item in (number, count):
        if item is not None and not isinstance(item, Register | Immediate):
            raise instruction.unknown("operand")

    def plan(machine: Any) -> Any:
        finish = _reduction(machine, name, kind, dst, source) if name else None
        counts = machine.read(count, "u32") if count is not None else None
        return Wait(machine.site(instruction), machine.read(number, "u32"), counts, is_aligned, finish)

    return plan


def _reduction(machine: Any, name: str, kind: str, dst: Any, source: Any) -> Any:
    is_negated = isinstance(source, Negated)
    values = machine.read(source.register if is_negated else source, "pred")
    place = machine.place(dst, kind)

    def finish(leaving: np.ndarray, lanes: np.ndarray) -> None:
        own = ~values[lanes] if is_negated else values[lanes]
        result = {"popc": np.count_nonzero, "and": np.all, "or": np.any}[name](own)
        place[leaving] = result

    return finish


@handles(*JUMPS, is_pure=False)
def _jump(instruction: Instruction) -> Plan:
    form, head = Form(instruction), instruction.head
    form.ignore("uni")
    if head == "bra":
        (label,) = form.done(1)
        if not isinstance(label, Symbol):
            raise instruction.unknown("label")
    else:
        form.done(0)
    return lambda machine: (lambda: None, lambda mask: None)
