"""cp.async: what was asked for lands only when the thread that asked waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .access import _HINTS, _check_address, _with_lanes, addresses_of
from .faults import InFlight, MemoryFault
from .forms import Form, Plan, Step, handles
from .operands import Immediate, Register
from .parse import Instruction


@dataclass
class _Copy:
    """One executed cp.async of several lanes."""

    site: Any
    lanes: np.ndarray
    group: np.ndarray  # by lane: the number of the group that it belongs to
    source: np.ndarray
    places: np.ndarray  # bytes in the shared memory of all blocks
    data: np.ndarray  # [lane, byte], zeros past what is read
    num_read: np.ndarray


class Copies:
    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.group = np.zeros(machine.num_lanes, np.int64)  # the one being filled
        self.pending: list[_Copy] = []

    def start(
        self, site: Any, lanes: np.ndarray, source: np.ndarray, target: np.ndarray, size: int, num_read: np.ndarray
    ) -> None:
        shared, memory = self.machine.space("shared"), self.machine.space("global")
        places = shared.places(site, lanes, target, size)
        data = np.zeros((len(lanes), size), np.uint8)
        memory.check_alignment(site, lanes, source, size)
        for count in np.unique(num_read).tolist():
            chosen = np.flatnonzero(num_read == count)
            if count == size:
                words = memory.load(site, lanes[chosen], source[chosen], np.dtype("u4"), size // 4, is_constant=False)
                data[chosen] = np.ascontiguousarray(words).reshape(len(chosen), -1).view(np.uint8)
            elif count:
                data[chosen, :count] = memory.load_bytes(site, lanes[chosen], source[chosen], count)
        races = shared.races
        races.write(site, lanes, races.granules(places, size), in_flight=True)
        self.machine.statistics.shared_access(site, lanes, target, size, True)
        self.pending.append(_Copy(site, lanes, self.group[lanes].copy(), source, places, data, num_read))

    def commit(self, lanes: Any) -> None:
        self.group[slice(None) if lanes is None else lanes] += 1

    def wait(self, lanes: Any, num_open: int) -> None:
        """Lands all but the last `num_open` committed groups of these threads."""
        if not self.pending:
            return
        limit = np.full(self.machine.num_lanes, -1, np.int64)
        chosen = slice(None) if lanes is None else lanes
        limit[chosen] = self.group[chosen] - num_open
        kept = []
        for copy in self.pending:
            lands = copy.group < limit[copy.lanes]
            if lands.all():
                self._land(copy)
            elif lands.any():
                self._land(_part(copy, lands))
                kept.append(_part(copy, ~lands))
            else:
                kept.append(copy)
        self.pending = kept

    def _land(self, copy: _Copy) -> None:
        shared = self.machine.space("shared")
        size = copy.data.shape[1]
        reads = np.flatnonzero(copy.num_read)
        now = self.machine.space("global").peek(copy.source[reads], size)
        changed = ((now != copy.data[reads]) & (np.arange(size) < copy.num_read[reads, None])).any(axis=1)
        if changed.any():
            place = int(reads[np.flatnonzero(changed)[0]])
            raise copy.site.fault(
                InFlight, copy.lanes, place, f"its source {int(copy.source[place]):#x} was changed before it landed"
            )
        shared.view(np.dtype("u1"), size)[copy.places // size] = copy.data
        shared.races.land(copy.lanes, shared.races.granules(copy.places, size))

    def finish(self) -> None:
        for copy in self.pending:
            raise copy.site.fault(InFlight, copy.lanes, 0, "the kernel ended before it was waited for")


def _part(copy: _Copy, mask: np.ndarray) -> _Copy:
    arrays = (copy.lanes, copy.group, copy.source, copy.places, copy.data, copy.num_read)
    return _Copy(copy.site, *(array[mask] for array in arrays))


@handles("cp", is_pure=False)
def _cp(instruction: Instruction) -> Plan:
    form = Form(instruction)
    if not form.flag("async"):
        raise instruction.unknown("form")
    if form.flag("commit_group"):
        form.done(0)
        return _plan(lambda machine, lanes: machine.copies.commit(lanes))
    if form.flag("wait_all"):
        form.done(0)
        return _plan(_wait_all)
    if form.flag("wait_group"):
        (number,) = form.done(1)
        if not isinstance(number, Immediate):
            raise instruction.unknown("operand")
        return _plan(lambda machine, lanes: machine.copies.wait(lanes, number.value))
    return _copy(instruction, form)


def _wait_all(machine: Any, lanes: Any) -> None:
    machine.copies.commit(lanes)
    machine.copies.wait(lanes, 0)


def _plan(run: Any) -> Plan:
    def plan(machine: Any) -> Step:
        return (lambda: run(machine, None)), _with_lanes(lambda lanes: run(machine, lanes))

    return plan


def _copy(instruction: Instruction, form: Form) -> Plan:
    how = form.one_of("ca", "cg")
    space = form.one_of("shared", "shared::cta")
    form.one_of("global")
    form.ignore(*(hint for hint in _HINTS if hint.startswith("L2::")))
    target, source, size, *rest = form.done(3, 4)
    if not isinstance(size, Immediate) or size.value not in ((16,) if how == "cg" else (4, 8, 16)):
        raise instruction.unknown("size")
    into = _check_address(instruction, target, space.split("::")[0])
    out_of = _check_address(instruction, source, "global")
    if rest and not isinstance(rest[0], Register | Immediate):
        raise instruction.unknown("operand")
    is_ignored = bool(rest) and isinstance(rest[0], Register) and rest[0].type == "pred"

    def plan(machine: Any) -> Step:
        site = machine.site(instruction)
        targets, sources = addresses_of(machine, into), addresses_of(machine, out_of)
        everyone = np.arange(machine.num_lanes)
        given = machine.read(rest[0], "pred" if is_ignored else "u32") if rest else None

        def run(lanes: Any) -> None:
            who = everyone if lanes is None else lanes
            num_read = np.full(len(who), size.value, np.int64)
            if given is not None:
                num_read = np.where(given[who], 0, size.value) if is_ignored else given[who].astype(np.int64)
                if (num_read > size.value).any():
                    wrong = int(np.flatnonzero(num_read > size.value)[0])
                    raise site.fault(MemoryFault, lanes, wrong, f"src-size {int(num_read[wrong])} is over {size.value}")
            machine.copies.start(site, who, sources(who), targets(who), size.value, num_read)

        return (lambda: run(None)), _with_lanes(run)

    return plan
