"""What orders or hints and has no effect of its own here: blocks exchange nothing, and threads only
through barriers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .access import LOCAL_WINDOW, SHARED_WINDOW
from .forms import Form, Plan, elementwise, handles
from .parse import Instruction


def _nothing(machine: Any) -> Any:
    return (lambda: None), (lambda mask: None)


@handles("membar", "fence")
def _fence(instruction: Instruction) -> Plan:
    form = Form(instruction)
    form.ignore("sc", "acq_rel", "cta", "gpu", "gl", "sys", "cluster")
    form.done(0)
    return _nothing


@handles("prefetch", "prefetchu", "nanosleep", "griddepcontrol")
def _hint(instruction: Instruction) -> Plan:
    form = Form(instruction)
    form.ignore("global", "L1", "L2", "u32", "wait", "launch_dependents")
    form.done(0, 1)
    return _nothing


@handles("isspacep")
def _isspacep(instruction: Instruction) -> Plan:
    form = Form(instruction)
    space = form.one_of("global", "shared", "local")
    dst, source = form.done(2)

    def run(address: np.ndarray, out: np.ndarray) -> None:
        window = address & np.uint64(SHARED_WINDOW | LOCAL_WINDOW)
        np.equal(window, np.uint64({"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0)), out)

    def build(machine: Any, arrays: list[np.ndarray], out: np.ndarray) -> Any:
        return partial(run, *arrays, out)

    return elementwise(instruction, dst, "pred", [(source, "u64")], build)
