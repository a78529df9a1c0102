"""32-bit arithmetic with the carry flag: add.cc, addc, sub.cc, subc, mad.cc, madc."""

from __future__ import annotations

from typing import Any

import numpy as np

from .forms import Form, Plan, Step, elementwise
from .parse import Instruction


def carry_plan(instruction: Instruction) -> Plan:
    form, head = Form(instruction), instruction.head
    part = form.one_of("lo", "hi") if head.startswith("mad") else ""
    sets, takes = form.flag("cc"), head.endswith("c")
    kind = form.type("u32", "s32")
    dst, *sources = form.done(4 if part else 3)
    is_difference = head.startswith("sub")
    signed = kind == "s32"

    def run(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> np.ndarray:
        """Fills out, and gives the new flag: a carry, or of differences a borrow."""
        a, b, *c = (array.astype(np.int64) for array in arrays)
        if part:
            product = a * b if signed else a.astype(np.uint64) * b.astype(np.uint64)
            a = (product.astype(np.uint64) >> np.uint64(32 if part == "hi" else 0)).astype(np.int64) & 0xFFFFFFFF
            b = c[0]
        a, b = a & 0xFFFFFFFF, b & 0xFFFFFFFF
        flag = machine.flag("carry").astype(np.int64) if takes else 0
        total = a - b - flag if is_difference else a + b + flag
        np.copyto(out.view(np.uint32), total & 0xFFFFFFFF, "unsafe")
        return (total < 0) | (total > 0xFFFFFFFF)

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        return lambda: run(machine, arrays, out)

    plan = elementwise(instruction, dst, kind, [(item, kind) for item in sources], build)
    return _keeping_flag(plan, sources, kind, run) if sets else plan


def _keeping_flag(plan: Plan, sources: list[Any], kind: str, run: Any) -> Plan:
    def bind(machine: Any) -> Step:
        full, masked = plan(machine)
        arrays, spare = [machine.read(item, kind) for item in sources], np.empty(machine.num_lanes, np.uint32)
        flags = machine.flag("carry")

        # The flag is computed before the result may overwrite a source.
        def all_lanes() -> None:
            after = run(machine, arrays, spare)
            full()
            flags[:] = after

        def some(mask: np.ndarray) -> None:
            after = run(machine, arrays, spare)
            masked(mask)
            np.copyto(flags, after, where=mask)

        return all_lanes, some

    return bind
