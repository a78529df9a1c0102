"""What the lanes of a warp do together: shuffles, votes, matches, reductions and bar.warp.sync."""

from __future__ import annotations

from typing import Any

import numpy as np

from .faults import Divergence
from .forms import DTYPES, Form, Plan, Step, handles
from .operands import Immediate, Negated, Pair, Register, Sink
from .parse import Instruction

_LANE_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


class Party:
    """Checks that the lanes named by a member mask are there together."""

    def __init__(self, machine: Any, instruction: Instruction, members: Any) -> None:
        self.machine, self.site = machine, machine.site(instruction)
        self.members = machine.read(members, "u32")
        self.is_whole = isinstance(members, Immediate) and members.value & 0xFFFFFFFF == 0xFFFFFFFF

    def check(self, mask: np.ndarray | None) -> np.ndarray:
        """[warps, 32]: who takes part."""
        machine = self.machine
        active = machine.everyone if mask is None else mask
        if mask is None and (self.is_whole or not (self.members != 0xFFFFFFFF).any()):
            return active.reshape(-1, 32)
        here = active.reshape(-1, 32)
        named = (self.members.reshape(-1, 32)[:, :, None] & _LANE_BITS) != 0  # [warp, lane, member]
        alive = machine.alive.reshape(-1, 32)
        wrong = here & ((named & alive[:, None, :]) != here[:, None, :]).any(axis=2)
        if wrong.any():
            lane = int(np.flatnonzero(wrong.reshape(-1))[0])
            members = int(self.members[lane])
            present = int((here[lane // 32] * _LANE_BITS).sum())
            raise self.site.fault(
                Divergence,
                None,
                lane,
                f"its members are {members:#010x}, but the warp's lanes here are {present:#010x}",
            )
        return here

    def order(self, here: np.ndarray) -> None:
        """Orders the lanes of whole warps."""
        self.machine.order_warps(here)


def whole_warps(machine: Any, site: Any, mask: np.ndarray | None, needs_all: bool = False) -> np.ndarray:
    """The warps (numbers) that reach an .aligned instruction; all of their lanes that have not
    exited must.

    needs_all: no lane may have exited, or be missing since the block's size is no multiple of 32.
    """
    if mask is None:
        return machine.all_warps
    here = mask.reshape(-1, 32)
    reached = here.any(axis=1)
    missing = reached[:, None] & ~here
    if not needs_all:
        missing &= machine.alive.reshape(-1, 32)
    if missing.any():
        lane = int(np.flatnonzero((reached[:, None] & here & missing.any(axis=1)[:, None]).reshape(-1))[0])
        away = int(np.flatnonzero(missing.reshape(-1))[0])
        raise site.fault(Divergence, None, lane, f"lane {away % 32} of its warp is elsewhere, or has exited")
    return np.flatnonzero(reached)


@handles("shfl", is_pure=False)
def _shfl(instruction: Instruction) -> Plan:
    form = Form(instruction)
    form.one_of("sync")
    mode = form.one_of("up", "down", "bfly", "idx")
    form.type("b32")
    dst, source, amount, control, members = form.done(5)
    value, is_inside = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, Sink())

    def plan(machine: Any) -> Step:
        party = Party(machine, instruction, members)
        a, b, c = (machine.read(item, "u32") for item in (source, amount, control))
        place = machine.place(value, "b32")
        flag = machine.place(is_inside, "pred")
        lane = np.broadcast_to(np.arange(32), (machine.num_lanes // 32, 32))
        row = np.arange(machine.num_lanes // 32)[:, None] * 32

        def run(mask: np.ndarray | None) -> None:
            here = party.check(mask)
            by = (b.astype(np.int64) & 31).reshape(-1, 32)
            limits = c.astype(np.int64).reshape(-1, 32)
            clamp, segment = limits & 31, (limits >> 8) & 31
            last = (lane & segment) | (clamp & ~segment)
            first = lane & segment
            if mode == "up":
                wanted = lane - by
                valid = wanted >= last
            elif mode == "down":
                wanted = lane + by
                valid = wanted <= last
            elif mode == "bfly":
                wanted = lane ^ by
                valid = wanted <= last
            else:
                wanted = first | (by & ~segment)
                valid = wanted <= last
            wanted = np.where(valid, wanted, lane)
            chosen = (row + wanted).reshape(-1)
            absent = ~here.reshape(-1)[chosen] & here.reshape(-1)
            if absent.any():
                wrong = int(np.flatnonzero(absent)[0])
                raise party.site.fault(
                    Divergence, None, wrong, f"it reads lane {chosen[wrong] % 32}, which takes no part"
                )
            result, valid = a[chosen], valid.reshape(-1)
            party.order(here)
            if mask is None:
                place[:] = result
                flag[:] = valid
            else:
                np.copyto(place, result, where=mask)
                np.copyto(flag, valid, where=mask)

        return (lambda: run(None)), run

    return plan


@handles("vote", "activemask", "match", "redux", is_pure=False)
def _vote(instruction: Instruction) -> Plan:
    form, head = Form(instruction), instruction.head
    if head == "activemask":
        form.type("b32")
        (dst,) = form.done(1)
        return _collective(instruction, dst, "u32", Immediate(-1), [], lambda here, arrays: _bits(here, here), False)
    form.one_of("sync")
    if head == "vote":
        mode = form.one_of("all", "any", "uni", "ballot")
        kind = form.type("b32" if mode == "ballot" else "pred")
        dst, source, members = form.done(3)
        return _collective(instruction, dst, kind, members, [(source, "pred")], _VOTES[mode])
    if head == "match":
        mode = form.one_of("any", "all")
        kind = form.type("b32", "b64")
        dst, source, members = form.done(3)
        if mode == "all":
            raise instruction.unknown("form")
        return _collective(instruction, dst, "u32", members, [(source, kind)], _match)
    name = form.one_of("add", "min", "max", "and", "or", "xor")
    kind = form.type("u32", "s32", "b32")
    dst, source, members = form.done(3)
    return _collective(instruction, dst, kind, members, [(source, kind)], _REDUCTIONS[name])


def _bits(here: np.ndarray, flags: np.ndarray) -> np.ndarray:
    return np.broadcast_to(((here & flags) * _LANE_BITS).sum(axis=1, dtype=np.uint32)[:, None], here.shape)


def _match(here: np.ndarray, arrays: list[np.ndarray]) -> np.ndarray:
    equal = (arrays[0][:, :, None] == arrays[0][:, None, :]) & here[:, None, :]
    return (equal * _LANE_BITS).sum(axis=2, dtype=np.uint32)


def _spread(values: np.ndarray) -> np.ndarray:
    return np.broadcast_to(values[:, None], (len(values), 32))


_VOTES: dict[str, Any] = {
    "all": lambda here, arrays: _spread((arrays[0] | ~here).all(axis=1)),
    "any": lambda here, arrays: _spread((arrays[0] & here).any(axis=1)),
    "uni": lambda here, arrays: _spread((arrays[0] | ~here).all(axis=1) | ~(arrays[0] & here).any(axis=1)),
    "ballot": lambda here, arrays: _bits(here, arrays[0]),
}


def _reduction(function: Any, neutral: Any) -> Any:
    def run(here: np.ndarray, arrays: list[np.ndarray]) -> np.ndarray:
        values = arrays[0]
        limits = np.iinfo(values.dtype)
        nothing = {"max": limits.max, "min": limits.min, "ones": np.array(-1).astype(values.dtype)}.get(neutral, 0)
        return _spread(
            function.reduce(np.where(here, values, nothing).astype(values.dtype), axis=1, dtype=values.dtype)
        )

    return run


_REDUCTIONS = {
    "add": _reduction(np.add, ""),
    "min": _reduction(np.minimum, "max"),
    "max": _reduction(np.maximum, "min"),
    "and": _reduction(np.bitwise_and, "ones"),
    "or": _reduction(np.bitwise_or, ""),
    "xor": _reduction(np.bitwise_xor, ""),
}


def _collective(
    instruction: Instruction,
    dst: Any,
    kind: str,
    members: Any,
    sources: list[Any],
    function: Any,
    is_synchronised: bool = True,
) -> Plan:
    if not isinstance(dst, Register | Sink) or not isinstance(members, Register | Immediate):
        raise instruction.unknown("operands")

    def plan(machine: Any) -> Step:
        party = Party(machine, instruction, members)
        place = machine.place(dst, kind)
        inputs = []
        for source, source_kind in sources:
            is_negated = isinstance(source, Negated)
            inputs.append((machine.read(source.register if is_negated else source, source_kind), is_negated))

        def run(mask: np.ndarray | None) -> None:
            if is_synchronised:
                here = party.check(mask)
                party.order(here)
            else:
                here = (machine.everyone if mask is None else mask).reshape(-1, 32)
            arrays = [(~array if is_negated else array).reshape(-1, 32) for array, is_negated in inputs]
            result = function(here, arrays).reshape(-1).astype(DTYPES[kind])
            if mask is None:
                place[:] = result
            else:
                np.copyto(place, result, where=mask)

        return (lambda: run(None)), run

    return plan


def warp_barrier(instruction: Instruction, members: Any) -> Plan:
    def plan(machine: Any) -> Step:
        party = Party(machine, instruction, members)

        def run(mask: np.ndarray | None) -> None:
            machine.order_warps(party.check(mask), is_barrier=True)

        return (lambda: run(None)), run

    return plan
