"""The CPU target: an operation's plan, its path, its runs on several threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.cpu import isa, self_test, speed_test
from numba_prefix.cpu.kernel.params import FIELDS, Params
from numba_prefix.cpu.kernel.sizes import BLOCK_M, BLOCK_N
from numba_prefix.cpu.paths import PATHS, Path, by_name, kernel_of
from numba_prefix.cpu.plan import CpuPlan, bind, cut_tiles, kept_plan, make_plan
from numba_prefix.cpu.simd.features import cpu_name
from numba_prefix.inputs.arrays import bits, data_address, describe
from numba_prefix.inputs.dense import are_dense, dense_operands
from numba_prefix.inputs.problem import Operands, Problem
from numba_prefix.planning import workspace as workspaces
from numba_prefix.planning.target import HostTarget, PlanOptions
from numba_prefix.planning.work import Cutter
from numba_prefix.planning.workspace import ALIGNMENT
from numba_prefix.rules import tiling
from numba_prefix.runtime import openmp
from numba_prefix.runtime.num_threads import capped, resolved
from numba_prefix.runtime.pool import run_together
from numba_prefix.runtime.signal_guard import uninterrupted

# Instructions for pairs take products below 2**-126 as 0, which a larger scale would make scores
# of.
MAX_PAIRS_SCALE = 2.0**60
CANCELLED = 1 << 62  # a queue counter at which no item is left


class CpuTarget(HostTarget):
    """An operation on the CPU."""

    # Problem, operands, lse and, unless dense copies have to be bound at every run, parameters.
    _bound: tuple[Problem, Operands, Any, Params | None]

    def __init__(self, problem: Problem, operands: Operands, options: PlanOptions) -> None:
        super().__init__(problem, operands, options)
        num_threads = resolved(options.num_threads)
        self._dtype = problem.dtype
        self.plan = plan(
            problem, *options.lengths, num_threads, options.held_blocks, options.is_part, options.pool, options.path
        )

    @property
    def reason(self) -> str:
        seconds = measured(self._dtype)
        is_chosen = self.plan.path.name in seconds and self._options.path is None
        return reason(self.plan.path) + (f" (measured: {speed_test.summary(seconds)})" if is_chosen else "")

    @property
    def workspace_bytes(self) -> int:
        return self.plan.workspace_bytes

    def bind(self, problem: Problem, operands: Operands, lse: Any) -> None:
        self._bound = problem, operands, lse, self._params(operands, lse) if are_dense(operands) else None

    def _params(self, dense: Operands, lse: Any) -> Params:
        assert dense.out is not None
        return bind(self.plan, dense, dense.out, 0 if lse is None else describe(lse, "lse").address)

    def run(self, workspace: Any, num_threads: int | None = None, stream: Any = None) -> None:
        problem, operands, lse, params = self._bound  # read once: another thread may rebind
        if not self._options.is_one_shot:
            self.check_tables(problem, operands)
        address, buffer = workspaces.take(workspace, self.plan.workspace_bytes)
        dense = operands
        if params is None:
            dense = dense_operands(operands)
            params = self._params(dense, lse)
        run(self.plan, params, address, (buffer, dense, lse), num_threads)
        if dense.out is not operands.out:
            assert operands.out is not None
            assert dense.out is not None
            bits(operands.out)[...] = bits(dense.out)
        if workspace is None:
            workspaces.give_back(buffer)


def plan(
    problem: Problem,
    q_len: NDArray[np.int64],
    kv_len: NDArray[np.int64],
    num_threads: int,
    held_blocks: NDArray[np.bool_] | None = None,
    is_part: bool = False,
    pool: str = "own",
    path_name: str | None = None,
) -> CpuPlan:
    """A plan on the path of that name; None: on the one that this problem takes. Other arguments
    as kept_plan's."""
    # Partial results are float32, and probabilities rounded to bfloat16 would show in them.
    needs_float32 = is_part or abs(problem.qk_scale) > MAX_PAIRS_SCALE
    dtype = "float32" if needs_float32 else problem.dtype
    path = ready_path(dtype) if path_name is None else _named_path(path_name, dtype)
    return kept_plan(path, problem, q_len, kv_len, num_threads, held_blocks, is_part, pool)


def reason(path: Path) -> str:
    return f"path {path.name} on {cpu_name()}"


@functools.cache
def make_ready(path: Path) -> bool:
    """Have a path's kernel compiled, or loaded, and all done that Numba does at a first call of
    any. False if it computes wrong results here: no call takes that path then."""
    uninterrupted(lambda: _call_without_work(path))
    is_right = path.is_exact or all(
        self_test.is_right(dtype, functools.partial(_compute, path)) for dtype in path.dtypes
    )
    if not is_right:
        isa.give_up(path, "it computes wrong results on this machine")
    return is_right


def _compute(
    path: Path, problem: Problem, operands: Operands, q_len: NDArray[np.int64], kv_len: NDArray[np.int64]
) -> None:
    _prepare(path, self_test.Case(problem, operands, q_len, kv_len))()


def _prepare(path: Path, case: self_test.Case) -> Callable[[], None]:
    """Runs of a problem on one thread."""
    problem, operands, q_len, kv_len = case
    assert operands.out is not None
    plan = make_plan(path, problem, q_len, kv_len, 1, None, False, "own")
    params = bind(plan, operands, operands.out, 0)
    workspace = np.empty(plan.workspace_bytes, np.uint8)
    return lambda: run(plan, params, workspace.ctypes.data, (workspace, operands))


def ready_path(dtype: str) -> Path:
    """The path that a dtype takes, ready: the only one, or the fastest on this machine."""
    while True:
        paths = isa.candidates(dtype)
        path = paths[0] if len(paths) == 1 else _fastest(dtype, paths)
        if make_ready(path):
            return path


def measured(dtype: str) -> Mapping[str, float]:
    """Seconds by which the path of a dtype was chosen in this process, or will be, as far as known:
    empty where there is no choice or nothing was measured yet."""
    paths = isa.candidates(dtype)
    if len(paths) == 1:
        return {}
    return _seconds.get((dtype, paths)) or speed_test.load(dtype, paths) or {}


# By dtype and paths. One answer for the life of a process: results must not change within it.
_seconds: dict[tuple[str, tuple[Path, ...]], Mapping[str, float]] = {}


def _fastest(dtype: str, paths: tuple[Path, ...]) -> Path:
    """The fastest of these paths, by what this process knows, what an earlier one left on disk, or
    a measurement; any one of them if some turn out to be wrong meanwhile."""
    question = dtype, paths
    if question not in _seconds:
        uninterrupted(lambda: _find_seconds(*question))
    seconds = _seconds.get(question)
    return paths[0] if seconds is None else speed_test.fastest(seconds, paths)


def _find_seconds(dtype: str, paths: tuple[Path, ...]) -> None:
    """Works alone in this process: of several threads that ask, the first finds the answer."""
    if (dtype, paths) in _seconds:
        return
    seconds = speed_test.load(dtype, paths)
    if seconds is None:
        if not all([make_ready(path) for path in paths]):
            return  # there are fewer paths to choose from now
        seconds = speed_test.measure(dtype, paths, _prepare)
        speed_test.save(dtype, paths, seconds)
    _seconds[dtype, paths] = seconds


def _named_path(name: str, dtype: str) -> Path:
    """The path of that name, ready. Raises ValueError for one that this machine or these operands
    cannot take."""
    path = by_name(name)
    why = isa.obstacle(path)
    if not why and dtype not in path.dtypes:
        why = f"it computes nothing in {dtype}"
    if not why and not make_ready(path):
        why = isa.obstacle(path)
    if why:
        usable = ", ".join(other.name for other in PATHS if dtype in other.dtypes and not isa.obstacle(other))
        raise ValueError(f"path: got {name!r} ({why}), expected one of {usable}")
    return path


def _call_without_work(path: Path) -> None:
    sequences, runs, work = _cut_no_work()
    kernel_of(path)(np.zeros(len(FIELDS), np.int64), sequences, runs, work, 0, 0)
    reason(path)


@functools.cache
def cutter() -> Cutter:
    """The compiled function that cuts the work of any target's plan into tiles."""
    uninterrupted(_cut_no_work)
    return cut_tiles


def _cut_no_work() -> tuple[NDArray[np.int64], ...]:
    """Tables of no sequence."""
    columns = tiling.SEQUENCE_COLUMNS, tiling.RUN_COLUMNS, tiling.WORK_COLUMNS
    sequences, runs, work = (np.zeros((0, width), np.int64) for width in columns)
    totals = np.zeros(3 + tiling.COST_BUCKETS, np.int64)
    cut_tiles(sequences, runs, 1, 1, 1, BLOCK_M, BLOCK_N, totals, work)
    return sequences, runs, work


def run(
    plan: CpuPlan,
    bound: Params,
    workspace_address: int,
    memory: Any,
    num_threads: int | None = None,
) -> None:
    """Computes what `bound` (from bind) is about. One bound call may run on several threads at
    once, each with its own workspace.

    workspace_address: of at least plan.workspace_bytes, at any alignment; what it held is
    overwritten. memory: whatever owns the buffers; held until the last thread is done with them,
    even if this one is interrupted. num_threads: at most this many, where that is fewer than
    planned. A cap that was set since the plan was made holds too.
    """
    layout = plan.layout
    if layout.total_bytes == 0:
        return
    num_workers = layout.num_workers if num_threads is None else min(num_threads, layout.num_workers)
    if num_workers > 1:
        num_workers = capped(num_workers)
    base = tiling.round_up(workspace_address, ALIGNMENT)
    ctypes.memset(base, 0, layout.partials)  # the counters
    block = bound.with_workspace(base, base + layout.arrivals, base + layout.partials, base + layout.scratch).block
    drain = kernel_of(plan.path)
    arguments = (block, plan.sequences, plan.runs, plan.work)

    def cancel() -> None:
        ctypes.c_int64.from_address(base).value = CANCELLED

    def task(worker: int, memory: Any = memory) -> None:
        try:
            while drain(*arguments, worker, plan.items_per_visit):
                pass
        except BaseException:
            cancel()
            raise

    lent = openmp.team(drain) if plan.frame is not None and num_workers > 1 else None
    if plan.frame is None or lent is None or not lent.has(num_workers):
        run_together(task, min(num_workers, plan.own_workers))
        return
    frame = plan.frame.copy()
    frame[openmp.FIRST_ADDRESS] = data_address(block)
    lent.run(frame, num_workers, task, cancel)
