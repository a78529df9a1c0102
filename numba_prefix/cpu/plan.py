"""Plans of the CPU target: everything about a run that depends neither on where the arrays are nor
on what they hold."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from numba_prefix.cpu.compile.jit import kernel
from numba_prefix.cpu.kernel.params import DTYPE_CODES, Params
from numba_prefix.cpu.kernel.scratch import decode_scratch
from numba_prefix.cpu.kernel.sizes import BLOCK_M, BLOCK_N, MAX_ITEM_HEADS, MIN_ITEMS_PER_THREAD
from numba_prefix.cpu.paths import Path, Scratch
from numba_prefix.inputs.arrays import Tensor
from numba_prefix.inputs.problem import Operands, Problem
from numba_prefix.planning.params import BIASES, FACTORS, addresses_of, bias_of, factors_of, has_shift, strides_of
from numba_prefix.planning.work import cut_work
from numba_prefix.planning.workspace import Layout, workspace_layout
from numba_prefix.rules import tiling
from numba_prefix.runtime import openmp

cut_tiles = kernel(tiling.cut_tiles)

# A helper costs about 100 us to wake, in which a thread does this much: with less for each, fewer
# are woken. Measured: 9 MFLOP take 145 us on one thread and 153 us on two.
FLOPS_PER_WORKER = 8e6
# PyTorch's threads are awake: two threads take 0.93 of one's time with 1.2 MFLOP.
FLOPS_PER_LENT_WORKER = 0.6e6
# Compiled code is left about this often, so that Ctrl-C is seen; 50e9 is a guess of one thread's
# speed to translate it.
FLOPS_PER_VISIT = 0.05 * 50e9
MAX_TALL_HEAD_SIZE = 128  # larger heads would not leave L2 caches of 512 KB enough
MAX_KEPT_BATCH = 64  # so that plans which are kept are small
# Helpers sleep for the life of the process: no slip of num_threads may start a million.
MAX_WORKERS = 512


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """The share of any number of runs that depends neither on arrays nor on what they hold."""

    path: Path
    layout: Layout
    sequences: NDArray[np.int64]  # [batch, SEQUENCE_COLUMNS]
    runs: NDArray[np.int64]  # [runs, RUN_COLUMNS]
    work: NDArray[np.int64]  # [entries, WORK_COLUMNS]
    params: Params  # without addresses and strides
    items_per_visit: int
    own_workers: int  # of so many, threads that have to be woken are worth it
    frame: NDArray[np.int64] | None  # what PyTorch's threads are told, if they help

    @property
    def workspace_bytes(self) -> int:
        return self.layout.total_bytes


def kept_plan(
    path: Path,
    problem: Problem,
    q_len: NDArray[np.int64],
    kv_len: NDArray[np.int64],
    num_threads: int,
    held_blocks: NDArray[np.bool_] | None = None,
    is_part: bool = False,
    pool: str = "own",
) -> CpuPlan:
    """A plan for checked arguments, of the last ones if it was made lately: layers of a network ask
    for the same one after the other. Lengths are int64 [batch], held_blocks bool [batch,
    max_block_num] (None: all). is_part: lse leaves out what kv_runs.part_shift says. pool: whose
    threads help, as a Context says."""
    if held_blocks is None and problem.batch <= MAX_KEPT_BATCH:
        return _kept_plan(path, problem, q_len.tobytes(), kv_len.tobytes(), num_threads, is_part, pool)
    return make_plan(path, problem, q_len, kv_len, num_threads, held_blocks, is_part, pool)


@functools.lru_cache(maxsize=16)
def _kept_plan(
    path: Path, problem: Problem, q_len: bytes, kv_len: bytes, num_threads: int, is_part: bool, pool: str
) -> CpuPlan:
    q, kv = np.frombuffer(q_len, np.int64), np.frombuffer(kv_len, np.int64)
    return make_plan(path, problem, q, kv, num_threads, None, is_part, pool)


def make_plan(
    path: Path,
    problem: Problem,
    q_len: NDArray[np.int64],
    kv_len: NDArray[np.int64],
    num_threads: int,
    held_blocks: NDArray[np.bool_] | None,
    is_part: bool,
    pool: str,
) -> CpuPlan:
    heights = tile_rows(path, problem, q_len, kv_len, num_threads)
    cut = cut_work(problem, q_len, kv_len, held_blocks, heights, BLOCK_M, BLOCK_N, cut_tiles)
    kv_heads = problem.kv_head_num
    is_decode = tiling.fold_rows(int(q_len.max(initial=0)), problem.group_size, problem.head_size) > 0
    item_heads = _item_heads(len(cut.work), kv_heads, num_threads) if is_decode else 1
    num_items = len(cut.work) * kv_heads // item_heads
    flops = 4.0 * problem.head_size * problem.head_num * float(np.dot(q_len.astype(np.float64), cut.num_held))
    most_workers = min(num_threads, MAX_WORKERS, num_items)
    speed = 1.0 if is_decode else path.guessed_speed
    own_workers = max(1, min(most_workers, int(flops / (FLOPS_PER_WORKER * speed))))
    lent_workers = max(1, min(most_workers, int(flops / (FLOPS_PER_LENT_WORKER * speed))))
    num_workers = lent_workers if pool == "torch" else own_workers
    items_per_visit = max(1, int(num_items * min(1.0, FLOPS_PER_VISIT * speed / max(flops, 1.0))))
    tallest = int(heights.max(initial=BLOCK_M))
    offsets, head_bytes = _scratch(None if is_decode else path, problem.dtype, problem.head_size, tallest)
    layout = workspace_layout(
        cut.split_tiles * kv_heads, cut.partial_f32 * kv_heads, head_bytes * item_heads, num_workers, num_items
    )
    bias = bias_of(problem)
    params = Params()
    params.set(offsets)
    params.set(dict(zip(FACTORS, factors_of(problem.qk_scale, bias), strict=True)))
    params.set(
        {
            "scratch_bytes": layout.scratch_bytes,
            "head_bytes": head_bytes,
            "num_items": num_items,
            "kv_head_num": kv_heads,
            "item_heads": item_heads,
            "group_size": problem.group_size,
            "head_size": problem.head_size,
            "block_size": problem.block_size,
            "q_dtype": DTYPE_CODES[problem.dtype],
            "kv_dtype": DTYPE_CODES[problem.dtype],
            "mask_dtype": DTYPE_CODES[problem.mask_dtype] if problem.mask_dtype else 0,
            "bias": BIASES.index(bias),
            "has_shift": has_shift(bias, is_part),
        }
    )
    frame = openmp.frame_of((params.block, cut.sequences, cut.runs, cut.work)) if pool == "torch" else None
    return CpuPlan(path, layout, cut.sequences, cut.runs, cut.work, params, items_per_visit, own_workers, frame)


@functools.cache
def _scratch(path: Path | None, dtype: str, head_size: int, tile_rows: int) -> Scratch:
    """Scratch for a path's tiles, or for decode tiles, which are the same on all paths (None)."""
    return decode_scratch(head_size) if path is None else path.scratch(dtype, head_size, tile_rows)


def _item_heads(entries: int, kv_heads: int, num_threads: int) -> int:
    """kv heads of a decode work item."""
    return max(
        heads
        for heads in range(1, min(kv_heads, MAX_ITEM_HEADS) + 1)
        if kv_heads % heads == 0 and (heads == 1 or entries * kv_heads >= heads * num_threads * MIN_ITEMS_PER_THREAD)
    )


def tile_rows(
    path: Path, problem: Problem, q_len: NDArray[np.int64], kv_len: NDArray[np.int64], num_threads: int
) -> NDArray[np.int64]:
    """Rows of each sequence's tiles, int64 [batch]. Results must not depend on the number of
    threads, so only sequences whose keys are never split get taller tiles than BLOCK_M; and a tile
    has to be done soon enough for Ctrl-C."""
    rows = q_len * problem.group_size
    least = path.tiles_per_thread * num_threads
    low = np.full(len(rows), BLOCK_M, np.int64)
    if problem.head_size > MAX_TALL_HEAD_SIZE or problem.num_tokens * problem.head_num < BLOCK_M * least:
        return low
    may_be_tall = tiling.is_never_split(rows, kv_len, BLOCK_M) & (rows > BLOCK_M)
    tallest = low
    for height in path.tile_heights:
        is_short = 4.0 * height * problem.head_size * kv_len <= FLOPS_PER_VISIT * path.guessed_speed
        tallest = np.where(may_be_tall & is_short, height, tallest)
    for height in reversed(path.tile_heights):
        tall = np.minimum(tallest, height)
        if int(np.sum(-(-rows // tall))) * problem.kv_head_num >= least:
            return tall
    return low


def bind(plan: CpuPlan, operands: Operands, out: Tensor, lse_address: int) -> Params:
    """A kernel's parameters about these arrays; run adds the workspace's.

    out: of the inputs' dtype or float32. lse_address: of float32 [num_tokens, head_num], or 0.
    """
    params = plan.params.with_arrays(addresses_of(operands, out, lse_address), strides_of(operands, out))
    params.set({"out_dtype": DTYPE_CODES[out.dtype]})
    return params
