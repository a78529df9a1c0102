"""The held keys of each sequence as runs of positions (see tiling.py), and the offset that the
log-sum-exp of some keys leaves out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import Tensor
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.inputs.problem import Problem
from numba_prefix.inputs.slopes import slope_values
from numba_prefix.rules.masks import left_align_shift
from numba_prefix.rules.tiling import END_RUN, FIRST_RUN, HELD_BEFORE, RUN_BEGIN, RUN_COLUMNS, RUN_END


def add_runs(
    sequences: NDArray[np.int64], kv_len: NDArray[np.int64], held_blocks: NDArray[np.bool_] | None, block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Runs, int64 [runs, RUN_COLUMNS], and number of held keys, int64 [batch]; writes each
    sequence's range of runs into `sequences`.

    held_blocks: bool [batch, max_block_num], or None for all keys.
    """
    batch = len(kv_len)
    if held_blocks is None:
        runs = np.zeros((batch, RUN_COLUMNS), np.int64)
        runs[:, RUN_END] = kv_len
        bounds = np.arange(batch + 1)
        sequences[:, FIRST_RUN], sequences[:, END_RUN] = bounds[:-1], bounds[1:]
        return runs, kv_len
    owner, begin, end = _held_ranges(held_blocks, kv_len, block_size)
    runs = np.empty((len(owner), RUN_COLUMNS), np.int64)
    runs[:, RUN_BEGIN], runs[:, RUN_END] = begin, end
    sequences[:, FIRST_RUN] = np.searchsorted(owner, np.arange(batch), side="left")
    sequences[:, END_RUN] = np.searchsorted(owner, np.arange(batch), side="right")
    before = np.cumsum(end - begin) - (end - begin)
    runs[:, HELD_BEFORE] = before - before[sequences[owner, FIRST_RUN]]
    last = runs[sequences[:, END_RUN] - 1]
    return runs, last[:, HELD_BEFORE] + last[:, RUN_END] - last[:, RUN_BEGIN]


def part_shift(
    problem: Problem, slopes: Tensor | None, q_len: NDArray[np.int64], kv_len: NDArray[np.int64]
) -> NDArray[np.float32] | None:
    """The offset, float32 [num_tokens, head_num], missing in the lse of a call over some of the
    keys; None for 0.

    Left-aligned biases grow with the position: an lse that contained them would have few bits left
    for weighing ranks' outputs, 1e-3 at 30,000 keys and a slope of 1/2. Waits for slopes on a GPU.
    """
    if problem.mask_type is not MaskType.ALIBI_COMPRESS_LEFT_ALIGN or problem.mask_form == "heads":
        return None
    starts = np.cumsum(q_len) - q_len
    q_pos = np.arange(problem.num_tokens) + np.repeat(kv_len - q_len - starts, q_len)
    slope = np.ones(problem.head_num, np.float32) if slopes is None else np.array(slope_values(slopes), np.float32)
    shift: NDArray[np.float32] = left_align_shift(slope, q_pos.astype(np.int32)[:, None])
    return shift


def _held_ranges(
    held_blocks: NDArray[np.bool_], kv_len: NDArray[np.int64], block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sequence, first position and one past the last of every run, in order; a sequence without
    held keys has one empty run."""
    batch, width = held_blocks.shape
    edged = np.zeros((batch, width + 2), np.int8)
    edged[:, 1:-1] = held_blocks & (np.arange(width) * block_size < kv_len[:, None])
    change = np.diff(edged, axis=1)
    owner, first_block = np.nonzero(change == 1)
    end_block = np.nonzero(change == -1)[1]
    without = np.setdiff1d(np.arange(batch), owner)
    nothing = np.zeros(len(without), np.int64)
    owner = np.concatenate([owner, without])
    begin = np.concatenate([first_block * block_size, nothing])
    end = np.concatenate([np.minimum(end_block * block_size, kv_len[owner[: len(end_block)]]), nothing])
    order = np.argsort(owner, kind="stable")
    return owner[order], begin[order], end[order]
