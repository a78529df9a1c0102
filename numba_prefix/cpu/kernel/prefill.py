"""Prefill on all paths: the state of a tile's rows, from an empty one to output rows.

State and accumulators are panels of 16 rows, one row a lane: acc [panel, head_size, 16], m_i and
l_i [panel, 2, 16].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import device_function
from numba_prefix.cpu.kernel.paged_kv import narrow_row
from numba_prefix.cpu.kernel.row_state import is_last_split, lse_of_panel, out_address, partial_address, store_lse
from numba_prefix.cpu.kernel.sizes import VECTOR_BYTES
from numba_prefix.cpu.simd.memory import (
    load1_f32,
    load_f32,
    splat_f32,
    store_f32,
    transpose_block,
)
from numba_prefix.rules import tiling
from numba_prefix.rules.softmax import add_part, normalize, rescale, running_max, shift_of
from numba_prefix.rules.tiling import lane_rows, round_up

NEG_INF = np.float32(-np.inf)
ZERO = np.float32(0.0)


@device_function
def start_state(params: Any, num_panels: Any, scratch_ptr: Any) -> None:
    """m_i = -inf, l_i = 0, acc = 0."""
    for panel in range(num_panels):
        store_f32(scratch_ptr + params.state_offset + 2 * panel * VECTOR_BYTES, splat_f32(NEG_INF))
        store_f32(scratch_ptr + params.state_offset + (2 * panel + 1) * VECTOR_BYTES, splat_f32(ZERO))
    for i in range(num_panels * round_up(params.head_size, 16)):
        store_f32(scratch_ptr + params.acc_offset + i * VECTOR_BYTES, splat_f32(ZERO))


@device_function
def store_output(params: Any, sequence: Any, first_row: Any, rows: Any, kv_head: Any, scratch_ptr: Any) -> None:
    """Normalises acc and writes output rows (and lse if asked for)."""
    pitch = params.row_pitch
    depth = round_up(params.head_size, 16)
    staging_ptr, lse_ptr = scratch_ptr + params.staging_offset, scratch_ptr + params.alpha_offset
    for panel in range(lane_rows(rows) >> 4):
        state_ptr = scratch_ptr + params.state_offset + 2 * panel * VECTOR_BYTES
        acc_ptr = scratch_ptr + params.acc_offset + panel * depth * VECTOR_BYTES
        l_i = load_f32(state_ptr + VECTOR_BYTES)
        store_f32(lse_ptr, lse_of_panel(params, panel, load_f32(state_ptr), l_i, scratch_ptr))
        for i in range(depth):
            store_f32(acc_ptr + i * VECTOR_BYTES, normalize(load_f32(acc_ptr + i * VECTOR_BYTES), l_i))
        for i in range(0, depth, 16):
            transpose_block(acc_ptr + i * VECTOR_BYTES, VECTOR_BYTES, staging_ptr + 4 * i, pitch)
        for lane in range(min(16, rows - panel * 16)):
            row = first_row + panel * 16 + lane
            target_ptr = out_address(params, sequence, row, kv_head)
            narrow_row(params.out_dtype, staging_ptr + lane * pitch, target_ptr, params.head_size)
            store_lse(params, sequence, row, kv_head, load1_f32(lse_ptr + 4 * lane))


@device_function
def store_partial(params: Any, partial_ptr: Any, num_panels: Any, scratch_ptr: Any) -> None:
    """Stores the state of a split for the merge: for each panel m_i, l_i, acc."""
    depth = round_up(params.head_size, 16)
    for panel in range(num_panels):
        state_ptr = scratch_ptr + params.state_offset + 2 * panel * VECTOR_BYTES
        store_f32(partial_ptr, load_f32(state_ptr))
        store_f32(partial_ptr + VECTOR_BYTES, load_f32(state_ptr + VECTOR_BYTES))
        partial_ptr += 2 * VECTOR_BYTES
        for i in range(depth):
            store_f32(partial_ptr, load_f32(scratch_ptr + params.acc_offset + (panel * depth + i) * VECTOR_BYTES))
            partial_ptr += VECTOR_BYTES


@device_function
def merge_partials(params: Any, work_item: Any, kv_head: Any, rows: Any, scratch_ptr: Any) -> None:
    """Merges the states of all splits of a tile into its own, in order of their keys whichever was
    done last."""
    depth = round_up(params.head_size, 16)
    num_splits = work_item[tiling.NUM_SPLITS]
    for panel in range(lane_rows(rows) >> 4):
        panel_start = panel * (depth + 2) * VECTOR_BYTES
        m_i = splat_f32(NEG_INF)
        for split_idx in range(num_splits):
            m_i = running_max(m_i, load_f32(partial_address(params, work_item, split_idx, kv_head, rows) + panel_start))
        shift = shift_of(m_i)
        acc_ptr = scratch_ptr + params.acc_offset + panel * depth * VECTOR_BYTES
        l_i = splat_f32(ZERO)
        for split_idx in range(num_splits):
            partial_ptr = partial_address(params, work_item, split_idx, kv_head, rows) + panel_start
            alpha = rescale(load_f32(partial_ptr), shift, params.unit_log2)
            l_i = l_i + load_f32(partial_ptr + VECTOR_BYTES) * alpha
            for i in range(depth):
                total = load_f32(acc_ptr + i * VECTOR_BYTES) if split_idx > 0 else splat_f32(ZERO)
                store_f32(
                    acc_ptr + i * VECTOR_BYTES, add_part(total, load_f32(partial_ptr + (2 + i) * VECTOR_BYTES), alpha)
                )
        store_f32(scratch_ptr + params.state_offset + 2 * panel * VECTOR_BYTES, m_i)
        store_f32(scratch_ptr + params.state_offset + (2 * panel + 1) * VECTOR_BYTES, l_i)


@device_function
def finish_prefill(
    params: Any, work_item: Any, sequence: Any, first_row: Any, rows: Any, kv_head: Any, scratch_ptr: Any
) -> None:
    """Brings the state of one head's tile to output rows, or that of a split to where the last of
    its splits finds it."""
    if work_item[tiling.NUM_SPLITS] > 1:
        partial_ptr = partial_address(params, work_item, work_item[tiling.SPLIT_IDX], kv_head, rows)
        store_partial(params, partial_ptr, lane_rows(rows) >> 4, scratch_ptr)
        if not is_last_split(params, work_item, kv_head):
            return
        merge_partials(params, work_item, kv_head, rows, scratch_ptr)
    store_output(params, sequence, first_row, rows, kv_head, scratch_ptr)
