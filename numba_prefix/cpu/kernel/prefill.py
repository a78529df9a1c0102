"""What prefill tiles of all paths have in common: the state of their rows, from an empty one to output rows.

State and accumulators are panels of 16 rows, one row a lane: acc [panel, head_size, 16], m_i and l_i [panel, 2, 16].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import part
from numba_prefix.cpu.kernel.paged_kv import narrow_row
from numba_prefix.cpu.kernel.row_state import is_last_split, lse_of_column, out_address, partial_address, store_lse
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


@part
def start_state(params: Any, columns: Any, scratch: Any) -> None:
    """m_i = -inf, l_i = 0, acc = 0."""
    for column in range(columns):
        store_f32(scratch + params.state_offset + 2 * column * VECTOR_BYTES, splat_f32(NEG_INF))
        store_f32(scratch + params.state_offset + (2 * column + 1) * VECTOR_BYTES, splat_f32(ZERO))
    for i in range(columns * round_up(params.head_size, 16)):
        store_f32(scratch + params.acc_offset + i * VECTOR_BYTES, splat_f32(ZERO))


@part
def store_output(params: Any, sequence: Any, first_row: Any, rows: Any, kv_head: Any, scratch: Any) -> None:
    """Normalises acc and writes output rows (and lse if asked for)."""
    pitch = params.row_pitch
    depth = round_up(params.head_size, 16)
    row_buffer, log_sums = scratch + params.staging_offset, scratch + params.alpha_offset
    for column in range(lane_rows(rows) >> 4):
        state = scratch + params.state_offset + 2 * column * VECTOR_BYTES
        acc = scratch + params.acc_offset + column * depth * VECTOR_BYTES
        l_i = load_f32(state + VECTOR_BYTES)
        store_f32(log_sums, lse_of_column(params, column, load_f32(state), l_i, scratch))
        for i in range(depth):
            store_f32(acc + i * VECTOR_BYTES, normalize(load_f32(acc + i * VECTOR_BYTES), l_i))
        for i in range(0, depth, 16):
            transpose_block(acc + i * VECTOR_BYTES, VECTOR_BYTES, row_buffer + 4 * i, pitch)
        for lane in range(min(16, rows - column * 16)):
            row = first_row + column * 16 + lane
            target = out_address(params, sequence, row, kv_head)
            narrow_row(params.out_dtype, row_buffer + lane * pitch, target, params.head_size)
            store_lse(params, sequence, row, kv_head, load1_f32(log_sums + 4 * lane))


@part
def store_partial(params: Any, place: Any, columns: Any, scratch: Any) -> None:
    """A split's state, for whoever finishes the tile: for each column m_i, l_i, acc."""
    depth = round_up(params.head_size, 16)
    for column in range(columns):
        state = scratch + params.state_offset + 2 * column * VECTOR_BYTES
        store_f32(place, load_f32(state))
        store_f32(place + VECTOR_BYTES, load_f32(state + VECTOR_BYTES))
        place += 2 * VECTOR_BYTES
        for i in range(depth):
            store_f32(place, load_f32(scratch + params.acc_offset + (column * depth + i) * VECTOR_BYTES))
            place += VECTOR_BYTES


@part
def merge_partials(params: Any, entry: Any, kv_head: Any, rows: Any, scratch: Any) -> None:
    """The states of all splits of a tile, in order of their keys whoever came last, as the tile's own state."""
    depth = round_up(params.head_size, 16)
    num_splits = entry[tiling.NUM_SPLITS]
    for column in range(lane_rows(rows) >> 4):
        start = column * (depth + 2) * VECTOR_BYTES
        m_i = splat_f32(NEG_INF)
        for split_idx in range(num_splits):
            m_i = running_max(m_i, load_f32(partial_address(params, entry, split_idx, kv_head, rows) + start))
        shift = shift_of(m_i)
        acc = scratch + params.acc_offset + column * depth * VECTOR_BYTES
        l_i = splat_f32(ZERO)
        for split_idx in range(num_splits):
            place = partial_address(params, entry, split_idx, kv_head, rows) + start
            alpha = rescale(load_f32(place), shift, params.unit_log2)
            l_i = l_i + load_f32(place + VECTOR_BYTES) * alpha
            for i in range(depth):
                total = load_f32(acc + i * VECTOR_BYTES) if split_idx > 0 else splat_f32(ZERO)
                store_f32(acc + i * VECTOR_BYTES, add_part(total, load_f32(place + (2 + i) * VECTOR_BYTES), alpha))
        store_f32(scratch + params.state_offset + 2 * column * VECTOR_BYTES, m_i)
        store_f32(scratch + params.state_offset + (2 * column + 1) * VECTOR_BYTES, l_i)


@part
def finish_prefill(
    params: Any, entry: Any, sequence: Any, first_row: Any, rows: Any, kv_head: Any, scratch: Any
) -> None:
    """The state of one head's tile, or split of it, to output rows or to where the last of its splits finds it."""
    if entry[tiling.NUM_SPLITS] > 1:
        place = partial_address(params, entry, entry[tiling.SPLIT_IDX], kv_head, rows)
        store_partial(params, place, lane_rows(rows) >> 4, scratch)
        if not is_last_split(params, entry, kv_head):
            return
        merge_partials(params, entry, kv_head, rows, scratch)
    store_output(params, sequence, first_row, rows, kv_head, scratch)
