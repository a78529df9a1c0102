"""The targets by name, imported when first asked for: `import numba_prefix` brings neither Numba
nor a driver."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from numba_prefix.front.reference_target import ReferenceTarget
from numba_prefix.inputs.problem import Operands, Problem
from numba_prefix.planning.target import PlanOptions, Target
from numba_prefix.planning.work import Cutter
from numba_prefix.runtime.signal_guard import uninterrupted

if TYPE_CHECKING:
    from numba_prefix.cpu.target import CpuTarget
    from numba_prefix.cuda.target import CudaTarget

Imported = TypeVar("Imported")


def plan_on(target: str, problem: Problem, operands: Operands, options: PlanOptions) -> Target:
    """An operation, planned on the target of that name. Raises what planning there does."""
    match target:
        case "cpu":
            return cpu_target()(problem, operands, options)
        case "cuda":
            return cuda_target()(problem, operands, options, work_cutter())
        case _:
            return ReferenceTarget(problem, operands, options)


def _imported_once(load: Callable[[], Imported]) -> Callable[[], Imported]:
    """`load`, which imports something: done at the first call only, and cut in half neither by
    Ctrl-C nor by a fork."""
    return functools.cache(lambda: uninterrupted(load))


@_imported_once
def cpu_target() -> type[CpuTarget]:
    from numba_prefix.cpu.target import CpuTarget

    return CpuTarget


@_imported_once
def cuda_target() -> type[CudaTarget]:
    from numba_prefix.cuda.target import CudaTarget

    return CudaTarget


@_imported_once
def work_cutter() -> Cutter:
    """The compiled function that cuts the work of every target's plans."""
    from numba_prefix.cpu.target import cutter

    return cutter()
