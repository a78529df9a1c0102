"""Planning and running a problem on the CPU target."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.cpu import heights, isa, self_test
from numba_prefix.cpu.compile.jit import kernel
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.paths import kernel_of, layout_of
from numba_prefix.cpu.simd.features import cpu_name
from numba_prefix.inputs.arrays import Tensor, data_address
from numba_prefix.inputs.problem import Operands, Problem
from numba_prefix.planning.plan import (
    BIASES,
    Cutters,
    addresses_of,
    bias_of,
    cut_work,
    factors_of,
    has_shift,
    strides_of,
)
from numba_prefix.planning.workspace import ALIGNMENT, Layout, workspace_layout
from numba_prefix.rules import tiling
from numba_prefix.runtime import openmp
from numba_prefix.runtime.num_threads import capped
from numba_prefix.runtime.pool import run_together
from numba_prefix.runtime.signal_guard import uninterrupted

count_work = kernel(tiling.count_work)
fill_work = kernel(tiling.fill_work)

# A helper costs about 100 us to wake, in which a thread does this much: with less for each, fewer are woken. Measured: 9
# MFLOP take 145 us on one thread and 153 us on two.
FLOPS_PER_WORKER = 8e6
FLOPS_PER_LENT_WORKER = 0.6e6  # of PyTorch's, which are awake: two threads take 0.93 of one's time with 1.2 MFLOP
MAX_PAIRS_SCALE = 2.0**60
MAX_KEPT_BATCH = 64  # so that plans which are kept are small
MAX_WORKERS = 512  # helpers sleep for the life of the process: no slip of num_threads may start a million
CANCELLED = 1 << 62  # a queue counter at which no item is left


def reason(path: str) -> str:
    return f"path {path} on {cpu_name()}"


@functools.cache
def make_ready(path: str) -> bool:
    """Have a path's kernel compiled, or loaded, and all done that Numba does at a first call of any. False if it computes
    wrong results here: no call takes that path then."""
    uninterrupted(lambda: _call_without_work(path))
    is_right = path == isa.VECTOR or all(
        self_test.is_right(dtype, functools.partial(_compute, path)) for dtype in isa.DTYPES[path]
    )
    if not is_right:
        isa.give_up(path, "it computes wrong results on this machine")
    return is_right


def _compute(
    path: str, problem: Problem, operands: Operands, q_len: NDArray[np.int64], kv_len: NDArray[np.int64]
) -> None:
    assert operands.out is not None
    plan = _plan(path, problem, q_len, kv_len, 1, None, False, "own")
    workspace = np.empty(plan.workspace_bytes, np.uint8)
    run(plan, bind(plan, operands, operands.out, 0), workspace.ctypes.data, (workspace, operands))


def _ready_path(dtype: str) -> str:
    while not make_ready(path := isa.path_of(dtype)):
        pass
    return path


def _call_without_work(path: str) -> None:
    _cut_no_work()
    call, factors = np.zeros(c.CALL_LENGTH, np.int64), np.zeros(c.FACTORS_LENGTH, np.float32)
    sequences = np.zeros((0, tiling.SEQUENCE_COLUMNS), np.int64)
    runs, work = (np.zeros((0, columns), np.int64) for columns in (tiling.RUN_COLUMNS, tiling.WORK_COLUMNS))
    kernel_of(path)(call, factors, sequences, runs, work, 0, 0)
    reason(path)


@functools.cache
def cutters() -> Cutters:
    """What cuts the work of any target's plan into tiles, ready to be called."""
    uninterrupted(_cut_no_work)
    return count_work, fill_work


def _cut_no_work() -> None:
    sequences = np.zeros((0, tiling.SEQUENCE_COLUMNS), np.int64)
    runs, work = (np.zeros((0, columns), np.int64) for columns in (tiling.RUN_COLUMNS, tiling.WORK_COLUMNS))
    totals = np.zeros(3 + tiling.COST_BUCKETS, np.int64)
    count_work(sequences, runs, 1, 1, True, c.BLOCK_M, c.BLOCK_N, totals)
    fill_work(sequences, runs, 1, 1, 1, True, c.BLOCK_M, c.BLOCK_N, totals, work)


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """Everything about a run that depends neither on where the arrays are nor on what they hold."""

    path: str  # of isa.PATHS
    layout: Layout
    sequences: NDArray[np.int64]  # [batch, SEQUENCE_COLUMNS]
    runs: NDArray[np.int64]  # [runs, RUN_COLUMNS]
    work: NDArray[np.int64]  # [entries, WORK_COLUMNS]
    template: NDArray[np.int64]  # [CALL_LENGTH], without addresses and strides
    factors: NDArray[np.float32]  # [FACTORS_LENGTH]
    items_per_visit: int
    own_workers: int  # of so many, threads that have to be woken are worth it
    frame: NDArray[np.int64] | None  # what PyTorch's threads are told, if they help

    @property
    def workspace_bytes(self) -> int:
        return self.layout.total_bytes


def plan(
    problem: Problem,
    q_len: NDArray[np.int64],
    kv_len: NDArray[np.int64],
    num_threads: int,
    held_blocks: NDArray[np.bool_] | None = None,
    is_part: bool = False,
    pool: str = "own",
) -> CpuPlan:
    """Lengths are int64 [batch], held_blocks bool [batch, max_block_num] (None: all), checked. is_part: lse leaves out what
    held.part_shift says. pool: whose threads help, as a Context says."""
    # Partial results are float32, and weights rounded to bfloat16 would show in them. Instructions for pairs take products below
    # 2**-126 as 0, which such a scale would make scores of.
    needs_float32 = is_part or abs(problem.qk_scale) > MAX_PAIRS_SCALE
    path = _ready_path("float32" if needs_float32 else problem.dtype)
    if held_blocks is None and problem.batch <= MAX_KEPT_BATCH:
        return _kept_plan(path, problem, q_len.tobytes(), kv_len.tobytes(), num_threads, is_part, pool)
    return _plan(path, problem, q_len, kv_len, num_threads, held_blocks, is_part, pool)


@functools.lru_cache(maxsize=16)
def _kept_plan(
    path: str, problem: Problem, q_len: bytes, kv_len: bytes, num_threads: int, is_part: bool, pool: str
) -> CpuPlan:
    """Layers of a network ask for the same plan one after the other."""
    q, kv = np.frombuffer(q_len, np.int64), np.frombuffer(kv_len, np.int64)
    return _plan(path, problem, q, kv, num_threads, None, is_part, pool)


def _plan(
    path: str,
    problem: Problem,
    q_len: NDArray[np.int64],
    kv_len: NDArray[np.int64],
    num_threads: int,
    held_blocks: NDArray[np.bool_] | None,
    is_part: bool,
    pool: str,
) -> CpuPlan:
    tile_rows = heights.tile_rows(path, problem, q_len, kv_len, num_threads)
    cut = cut_work(problem, q_len, kv_len, held_blocks, tile_rows, c.BLOCK_M, c.BLOCK_N, (count_work, fill_work))
    kv_heads = problem.kv_head_num
    has_few = tiling.fold_rows(int(q_len.max(initial=0)), problem.group_size, problem.head_size) > 0
    item_heads = _item_heads(len(cut.work), kv_heads, num_threads) if has_few else 1
    num_items = len(cut.work) * kv_heads // item_heads
    flops = 4.0 * problem.head_size * problem.head_num * float(np.dot(q_len.astype(np.float64), cut.num_held))
    most_workers = min(num_threads, MAX_WORKERS, num_items)
    speed = 1.0 if has_few else heights.SPEEDS[path]
    own_workers = max(1, min(most_workers, int(flops / (FLOPS_PER_WORKER * speed))))
    lent_workers = max(1, min(most_workers, int(flops / (FLOPS_PER_LENT_WORKER * speed))))
    num_workers = lent_workers if pool == "torch" else own_workers
    items_per_visit = max(1, int(num_items * min(1.0, heights.FLOPS_PER_VISIT * speed / max(flops, 1.0))))
    tallest = int(tile_rows.max(initial=c.BLOCK_M))
    offsets, head_bytes = (
        few_layout(problem.head_size) if has_few else layout_of(path, problem.dtype, problem.head_size, tallest)
    )
    layout = workspace_layout(
        cut.split_tiles * kv_heads, cut.partial_f32 * kv_heads, head_bytes * item_heads, num_workers, num_items
    )
    bias = bias_of(problem)
    template = np.zeros(c.CALL_LENGTH, np.int64)
    for place, value in offsets.items():
        template[place] = value
    template[c.SCRATCH_BYTES], template[c.HEAD_BYTES] = layout.scratch_bytes, head_bytes
    template[c.NUM_ITEMS], template[c.KV_HEAD_NUM], template[c.ITEM_HEADS] = num_items, kv_heads, item_heads
    template[c.GROUP_SIZE] = problem.group_size
    template[c.HEAD_SIZE], template[c.BLOCK_SIZE] = problem.head_size, problem.block_size
    template[c.DTYPE] = c.DTYPE_CODES[problem.dtype]
    template[c.MASK_DTYPE] = c.DTYPE_CODES[problem.mask_dtype] if problem.mask_dtype else 0
    template[c.IS_CAUSAL] = problem.is_causal
    template[c.BIAS], template[c.HAS_SHIFT] = BIASES.index(bias), has_shift(bias, is_part)
    factors = factors_of(problem.qk_scale, bias)
    frame = openmp.frame_of((template, factors, cut.sequences, cut.runs, cut.work)) if pool == "torch" else None
    return CpuPlan(
        path, layout, cut.sequences, cut.runs, cut.work, template, factors, items_per_visit, own_workers, frame
    )


def _item_heads(entries: int, kv_heads: int, num_threads: int) -> int:
    """kv heads of a work item of few rows."""
    return max(
        heads
        for heads in range(1, min(kv_heads, c.MAX_ITEM_HEADS) + 1)
        if kv_heads % heads == 0 and (heads == 1 or entries * kv_heads >= heads * num_threads * c.MIN_ITEMS_PER_THREAD)
    )


few_layout = functools.cache(c.few_layout)


def bind(plan: CpuPlan, operands: Operands, out: Tensor, lse_address: int) -> NDArray[np.int64]:
    """A kernel's int64 [CALL_LENGTH] with the addresses and byte strides of these arrays; run adds the workspace's.

    out: of the inputs' dtype or float32.
    lse_address: of float32 [num_tokens, head_num], or 0.
    """
    call = plan.template.copy()
    call[c.Q : c.LSE + 1] = addresses_of(operands, out, lse_address)
    call[c.Q_TOKEN : c.OUT_HEAD + 1] = strides_of(operands, out)
    call[c.OUT_DTYPE] = c.DTYPE_CODES[out.dtype]
    return call


def run(
    plan: CpuPlan,
    bound: NDArray[np.int64],
    workspace_address: int,
    memory: Any,
    num_threads: int | None = None,
) -> None:
    """Computes what `bound` (from bind) is about. One bound call may run on several threads at once, each with its own
    workspace.

    workspace_address: of at least plan.workspace_bytes, at any alignment; what it held is overwritten.
    memory: whatever owns the buffers; held until the last thread is done with them, even if this one is interrupted.
    num_threads: at most this many, where that is fewer than planned. A cap that was set since the plan was made holds too.
    """
    layout = plan.layout
    if layout.total_bytes == 0:
        return
    num_workers = layout.num_workers if num_threads is None else min(num_threads, layout.num_workers)
    if num_workers > 1:
        num_workers = capped(num_workers)
    base = tiling.round_up(workspace_address, ALIGNMENT)
    ctypes.memset(base, 0, layout.partials)  # the counters
    call = bound.copy()
    call[c.QUEUE], call[c.ARRIVALS] = base, base + layout.arrivals
    call[c.PARTIALS], call[c.SCRATCH] = base + layout.partials, base + layout.scratch
    drain = kernel_of(plan.path)
    arguments = (call, plan.factors, plan.sequences, plan.runs, plan.work)

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
    frame[openmp.FIRST_ADDRESS] = data_address(call)
    lent.run(frame, num_workers, task, cancel)
