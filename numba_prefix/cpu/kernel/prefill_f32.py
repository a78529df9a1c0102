"""The inner loops of path `vector`: columns of query rows against keys and values that are widened to float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline, part
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.paged_kv import has_special, item_bytes, list_rows, load_pages, load_query, prefetch_rows
from numba_prefix.cpu.kernel.prefill_f32_gemm import (
    MR,
    NV,
    output_product,
    output_product_1,
    score_product,
    score_product_1,
)
from numba_prefix.cpu.kernel.row_state import range_of_lanes, set_lane
from numba_prefix.cpu.kernel.scores import gather_entries, score_column, weigh_column
from numba_prefix.cpu.kernel.sizes import BLOCK_N, FLOAT, VECTOR_BYTES
from numba_prefix.cpu.simd.memory import (
    load1_f32,
    load_f32,
    load_i32,
    load_i64,
    splat_f32,
    splat_i32,
    store_f32,
    transpose_block,
)
from numba_prefix.rules import tiling
from numba_prefix.rules.elementwise import multiply_add, where
from numba_prefix.rules.masks import is_visible
from numba_prefix.rules.softmax import rescale, shift_of
from numba_prefix.rules.tiling import lane_rows, round_up

ZERO = np.float32(0.0)
# Products are summed in chunks of this many dimensions (half as many for small heads): 0.6 to 0.8 of the rounding error of
# one chain, for one addition in CHUNK.
CHUNK = 64


@part
def load_queries(params: Any, sequence: Any, runs: Any, first_row: Any, rows: Any, kv_head: Any, scratch: Any) -> None:
    """Query rows as columns of 16 lanes [head_size, 16], and what the rules need of each row. Lanes past the last row
    repeat it, so that they never widen a key range."""
    pitch = params.row_pitch
    depth = round_up(params.head_size, 16)
    row_buffer = scratch + params.staging_offset
    for lane in range(lane_rows(rows)):
        source = set_lane(params, sequence, runs, first_row + min(lane, rows - 1), kv_head, lane, scratch)
        load_query(params, source, row_buffer + (lane & 15) * pitch)
        if lane & 15 == 15:
            column = scratch + params.q_t_offset + (lane >> 4) * depth * VECTOR_BYTES
            for i in range(0, depth, 16):
                transpose_block(row_buffer + 4 * i, pitch, column + i * VECTOR_BYTES, VECTOR_BYTES)


@inline
def apply_rules(
    params: Any, column: Any, s: Any, is_edge: Any, kv_pos: Any, num_keys: Any, m_old: Any, scratch: Any
) -> Any:
    """Turns the products of one column at s into scores; returns the new running max."""
    origin = load_i32(scratch + params.bias_pos_offset + column * VECTOR_BYTES)
    begin = load_i32(scratch + params.begin_offset + column * VECTOR_BYTES)
    end = load_i32(scratch + params.end_offset + column * VECTOR_BYTES)
    slope = load_f32(scratch + params.slopes_offset + column * VECTOR_BYTES)
    kv_lane = splat_i32(0)
    entries = scratch + params.entries_offset
    if params.bias >= c.TEMPLATE_LINEAR:
        base = load_i64(scratch + params.mask_base_offset + 2 * column * VECTOR_BYTES)
        q_pos = load_i32(scratch + params.q_pos_offset + column * VECTOR_BYTES)
        gather_entries(params, base, q_pos, kv_pos, kv_lane, 1, num_keys, entries, scratch + params.staging_offset)
    return score_column(
        params, is_edge, s, entries, num_keys, kv_pos, 1, kv_lane, params.qk_scale, slope, origin, begin, end, m_old
    )


@part
def score_strip(params: Any, column: Any, s: Any, is_edge: Any, kv_pos: Any, num_keys: Any, scratch: Any) -> None:
    """One column, its products at s, from products to weights; leaves alpha for the output product."""
    state = scratch + params.state_offset + 2 * column * VECTOR_BYTES
    m_old = load_f32(state)
    m_i = apply_rules(params, column, s, is_edge, kv_pos, num_keys, m_old, scratch)
    shift = shift_of(m_i)
    unit_log2 = params.unit_log2
    alpha = rescale(m_old, shift, unit_log2)
    l_i = multiply_add(load_f32(state + VECTOR_BYTES), alpha, weigh_column(s, num_keys, shift, unit_log2))
    store_f32(state, m_i)
    store_f32(state + VECTOR_BYTES, l_i)
    store_f32(scratch + params.alpha_offset + column * VECTOR_BYTES, alpha)


@part
def careful_output(params: Any, column: Any, s: Any, v_rows: Any, kv_pos: Any, num_keys: Any, scratch: Any) -> None:
    """The output product of one column with values that are not finite: a weight of zero must not meet them. The same
    sums in the same order as the micro-kernel, so that rows which do not see such a value get the same bits."""
    begin = load_i32(scratch + params.begin_offset + column * VECTOR_BYTES)
    end = load_i32(scratch + params.end_offset + column * VECTOR_BYTES)
    alpha = load_f32(scratch + params.alpha_offset + column * VECTOR_BYTES)
    depth = round_up(params.head_size, 16)
    acc = scratch + params.acc_offset + column * depth * VECTOR_BYTES
    for i in range(depth):
        total = splat_f32(ZERO)
        for j in range(num_keys):
            value = splat_f32(load1_f32(v_rows + j * params.row_pitch + 4 * i))
            seen = multiply_add(load_f32(s + j * VECTOR_BYTES), value, total)
            total = where(is_visible(splat_i32(kv_pos + j), begin, end), seen, total)
        store_f32(acc + i * VECTOR_BYTES, multiply_add(alpha, load_f32(acc + i * VECTOR_BYTES), total))


@part
def attend_strip(
    params: Any,
    column: Any,
    width: Any,
    first: Any,
    kv_pos: Any,
    num_keys: Any,
    is_edge: Any,
    special: Any,
    scratch: Any,
) -> None:
    """`width` columns against num_keys keys in scratch, from number `first` on: score product, rule chain, output product."""
    head_size, pitch = params.head_size, params.row_pitch
    depth = round_up(head_size, 16)
    q_t = scratch + params.q_t_offset + column * depth * VECTOR_BYTES
    s = scratch + params.s_offset
    acc = scratch + params.acc_offset + column * depth * VECTOR_BYTES
    alpha = scratch + params.alpha_offset + column * VECTOR_BYTES
    k_rows, v_rows = scratch + params.k_rows_offset + first * pitch, scratch + params.v_rows_offset + first * pitch
    column_q, column_s = depth * VECTOR_BYTES, BLOCK_N * VECTOR_BYTES
    chunk = CHUNK if head_size >= 2 * CHUNK else CHUNK // 2
    for d in range(0, head_size, chunk):
        steps, q_rows = min(chunk, head_size - d), q_t + d * VECTOR_BYTES
        for j in range(0, num_keys, MR):
            keys = k_rows + j * pitch + FLOAT * d
            if width == 1:
                score_product_1(keys, pitch, q_rows, column_q, steps, s + j * VECTOR_BYTES, column_s, min(d, 1))
            else:
                score_product(keys, pitch, q_rows, column_q, steps, s + j * VECTOR_BYTES, column_s, min(d, 1))
    for v in range(width):
        score_strip(params, column + v, s + v * column_s, is_edge, kv_pos, num_keys, scratch)
    if special and is_edge:
        for v in range(width):
            careful_output(params, column + v, s + v * column_s, v_rows, kv_pos, num_keys, scratch)
        return
    for i in range(0, depth, MR):
        if width == 1:
            output_product_1(v_rows + 4 * i, pitch, s, column_s, num_keys, acc + i * VECTOR_BYTES, column_q, alpha)
        else:
            output_product(v_rows + 4 * i, pitch, s, column_s, num_keys, acc + i * VECTOR_BYTES, column_q, alpha)


@part
def list_next(
    params: Any, sequence: Any, runs: Any, kv_idx: Any, n_end: Any, table: Any, k: Any, v: Any, scratch: Any
) -> Any:
    """Lists the rows of the key tile that begins at kv_idx; returns how many they are."""
    kv_pos, num_keys = tiling.key_tile(runs, sequence, kv_idx, n_end, BLOCK_N)
    k_list, v_list = scratch + params.k_list_offset, scratch + params.v_list_offset
    list_rows(params, k, params.k_block_stride, params.k_slot_stride, table, kv_pos, num_keys, num_keys, k_list)
    list_rows(params, v, params.v_block_stride, params.v_slot_stride, table, kv_pos, num_keys, num_keys, v_list)
    return num_keys


@part
def attend_keys(
    params: Any, entry: Any, sequence: Any, runs: Any, table: Any, columns: Any, k: Any, v: Any, scratch: Any
) -> None:
    """All columns of a tile against the keys of one work item; meanwhile the rows of the next key tile come into the cache."""
    row_bytes = params.head_size * item_bytes(params.dtype)
    k_rows, v_rows = scratch + params.k_rows_offset, scratch + params.v_rows_offset
    kv_idx, n_end = entry[tiling.N_BEGIN], entry[tiling.N_END]
    _, tile_full_begin, tile_full_end, _ = range_of_lanes(params, 0, 16 * columns - 1, scratch)
    while kv_idx < n_end:
        kv_pos, num_keys = tiling.key_tile(runs, sequence, kv_idx, n_end, BLOCK_N)
        kv_idx += num_keys
        load_pages(params, k, params.k_block_stride, params.k_slot_stride, table, kv_pos, num_keys, k_rows)
        load_pages(params, v, params.v_block_stride, params.v_slot_stride, table, kv_pos, num_keys, v_rows)
        special = False
        if tiling.is_edge(tile_full_begin, tile_full_end, kv_pos, num_keys):
            special = has_special(v_rows, params.row_pitch, num_keys, params.head_size)
        num_next = list_next(params, sequence, runs, kv_idx, n_end, table, k, v, scratch)
        for column in range(0, columns, NV):
            width = min(NV, columns - column)
            asked = num_next * column // columns
            count = num_next * (column + width) // columns - asked
            prefetch_rows(scratch + params.k_list_offset + 8 * asked, count, row_bytes)
            prefetch_rows(scratch + params.v_list_offset + 8 * asked, count, row_bytes)
            begin, full_begin, full_end, end = range_of_lanes(params, 16 * column, 16 * (column + width) - 1, scratch)
            first, stop = tiling.keys_between(begin, end, kv_pos, num_keys)
            if first < stop:
                pos, count = kv_pos + first, stop - first
                is_edge = tiling.is_edge(full_begin, full_end, pos, count)
                attend_strip(params, column, width, first, pos, count, is_edge, special, scratch)
