"""The tables of a plan: a call's sequences, the runs of their held keys, and the work items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.problem import Problem
from numba_prefix.planning.kv_runs import add_runs
from numba_prefix.rules import tiling

Cutter = Callable[..., None]  # tiling.cut_tiles, compiled


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A call's work, cut into tiles. split_tiles and partial_f32 (float32 of split state) are for
    one kv head."""

    sequences: NDArray[np.int64]  # [batch, SEQUENCE_COLUMNS]
    runs: NDArray[np.int64]  # [runs, RUN_COLUMNS]
    num_held: NDArray[np.int64]  # [batch]
    work: NDArray[np.int64]  # [items, WORK_COLUMNS]
    split_tiles: int
    partial_f32: int


def cut_work(
    problem: Problem,
    q_len: NDArray[np.int64],
    kv_len: NDArray[np.int64],
    held_blocks: NDArray[np.bool_] | None,
    tile_rows: NDArray[np.int64] | int,
    split_m: int,
    block_n: int,
    cut_tiles: Cutter,
) -> Cut:
    """The tables of a call with checked lengths, int64 [batch].

    held_blocks: bool [batch, max_block_num], or None for all keys. tile_rows: block_m, for each
    sequence or for all. Keys are split as for tiles of split_m rows.
    """
    sequences = np.empty((problem.batch, tiling.SEQUENCE_COLUMNS), np.int64)
    np.cumsum(q_len, out=sequences[:, tiling.Q_BEGIN])
    sequences[:, tiling.Q_BEGIN] -= q_len
    sequences[:, tiling.Q_LEN], sequences[:, tiling.KV_LEN], sequences[:, tiling.TILE_ROWS] = q_len, kv_len, tile_rows
    sequences[:, tiling.LEFT], sequences[:, tiling.RIGHT] = visible_beside(problem)
    runs, num_held = add_runs(sequences, kv_len, held_blocks, problem.block_size)
    totals = np.empty(3 + tiling.COST_BUCKETS, np.int64)
    arguments = (problem.group_size, problem.kv_head_num, problem.head_size, split_m, block_n, totals)
    cut_tiles(sequences, runs, *arguments, np.empty((0, tiling.WORK_COLUMNS), np.int64))
    num_items, split_tiles, partial_f32 = (int(n) for n in totals[:3])
    work = np.empty((num_items, tiling.WORK_COLUMNS), np.int64)
    if num_items:
        cut_tiles(sequences, runs, *arguments, work)
    return Cut(sequences, runs, num_held, work, split_tiles, partial_f32)


def visible_beside(problem: Problem) -> tuple[int, int]:
    """LEFT and RIGHT of the sequence table: numbers of keys seen before and after a row's
    position."""
    return tiling.NO_LIMIT, 0 if problem.is_causal else tiling.NO_LIMIT
