"""The state that all tile loops keep per query row, and where output rows and states of splits lie
in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline
from numba_prefix.cpu.kernel.sizes import VECTOR_BYTES
from numba_prefix.cpu.simd.memory import (
    atomic_add,
    load1_f32,
    load1_i32,
    load_f32,
    load_i32,
    store1_f32,
    store1_i32,
    store1_i64,
)
from numba_prefix.rules import tiling
from numba_prefix.rules.masks import left_align_shift
from numba_prefix.rules.softmax import log_sum_exp
from numba_prefix.rules.tiling import group_idx_of_row, q_idx_of_row

ONE = np.float32(1.0)


@inline
def set_lane(params: Any, sequence: Any, runs: Any, row: Any, kv_head: Any, lane: Any, scratch_ptr: Any) -> Any:
    """Writes into a lane what the rules need of its row; returns the address of the row's query."""
    q_idx = q_idx_of_row(row, params.group_size)
    q_head = kv_head * params.group_size + group_idx_of_row(row, params.group_size)
    q_pos = tiling.q_pos_of_row(sequence, row, params.group_size)
    slope = load1_f32(params.slopes_ptr + 4 * q_head) if params.slopes_ptr != 0 else ONE
    store1_i32(scratch_ptr + params.q_pos_offset + 4 * lane, np.int32(q_pos))
    bias_pos = tiling.last_held(runs, sequence, q_pos) if params.has_shift != 0 else q_pos
    store1_i32(scratch_ptr + params.bias_pos_offset + 4 * lane, np.int32(bias_pos))
    store1_i32(scratch_ptr + params.begin_offset + 4 * lane, np.int32(tiling.visible_begin(sequence, q_pos)))
    store1_i32(scratch_ptr + params.end_offset + 4 * lane, np.int32(tiling.visible_end(sequence, q_pos)))
    store1_f32(scratch_ptr + params.slopes_offset + 4 * lane, slope)
    store1_i64(scratch_ptr + params.mask_base_offset + 8 * lane, params.mask_ptr + q_head * params.mask_head_stride)
    return params.q_ptr + (sequence[tiling.Q_BEGIN] + q_idx) * params.q_token_stride + q_head * params.q_head_stride


@inline
def range_of_lanes(params: Any, first: Any, last: Any, scratch_ptr: Any) -> Any:
    """tiling.visible_range of the rows in these lanes: begin, full_begin, full_end, end."""
    begins_ptr, ends_ptr = scratch_ptr + params.begin_offset, scratch_ptr + params.end_offset
    begin, full_begin = np.int64(load1_i32(begins_ptr + 4 * first)), np.int64(load1_i32(begins_ptr + 4 * last))
    full_end, end = np.int64(load1_i32(ends_ptr + 4 * first)), np.int64(load1_i32(ends_ptr + 4 * last))
    return begin, full_begin, full_end, end


@inline
def rows_of_panel(params: Any, panel: Any, scratch_ptr: Any) -> Any:
    """Lanes of what the rules need of a panel's rows: slope, bias_pos, begin, end."""
    at = panel * VECTOR_BYTES
    return (
        load_f32(scratch_ptr + params.slopes_offset + at),
        load_i32(scratch_ptr + params.bias_pos_offset + at),
        load_i32(scratch_ptr + params.begin_offset + at),
        load_i32(scratch_ptr + params.end_offset + at),
    )


@inline
def out_address(params: Any, sequence: Any, row: Any, kv_head: Any) -> Any:
    q_head = kv_head * params.group_size + group_idx_of_row(row, params.group_size)
    token = sequence[tiling.Q_BEGIN] + q_idx_of_row(row, params.group_size)
    return params.out_ptr + token * params.out_token_stride + q_head * params.out_head_stride


@inline
def store_lse(params: Any, sequence: Any, row: Any, kv_head: Any, value: Any) -> None:
    if params.lse_ptr != 0:
        q_head = kv_head * params.group_size + group_idx_of_row(row, params.group_size)
        token = sequence[tiling.Q_BEGIN] + q_idx_of_row(row, params.group_size)
        store1_f32(params.lse_ptr + 4 * (token * params.kv_head_num * params.group_size + q_head), value)


@inline
def lse_of_panel(params: Any, panel: Any, m_i: Any, l_i: Any, scratch_ptr: Any) -> Any:
    """Log-sum-exp of a panel's rows, with what left-aligned biases left out."""
    if params.has_shift != 0:
        slope = load_f32(scratch_ptr + params.slopes_offset + panel * VECTOR_BYTES)
        m_i = m_i + left_align_shift(slope, load_i32(scratch_ptr + params.bias_pos_offset + panel * VECTOR_BYTES))
    return log_sum_exp(m_i, l_i, params.unit)


@inline
def partial_address(params: Any, work_item: Any, split_idx: Any, kv_head: Any, rows: Any) -> Any:
    """Address of the state of a split."""
    size = tiling.partial_floats(rows, params.head_size)
    slot = split_idx * params.kv_head_num + kv_head
    return params.partials_ptr + 4 * (work_item[tiling.PARTIAL_OFFSET] + slot * size)


@inline
def is_last_split(params: Any, work_item: Any, kv_head: Any) -> Any:
    """Counts this split of a tile as done; returns whether all are now, so that their states can be
    merged."""
    arrivals = params.arrivals_ptr + 8 * (work_item[tiling.SPLIT_TILE] * params.kv_head_num + kv_head)
    return atomic_add(arrivals, 1) == work_item[tiling.NUM_SPLITS] - 1
