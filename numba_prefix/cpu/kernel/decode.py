"""The tile loop for few query rows (tiling.fold_rows): keys and values are read once, where they lie, nothing is packed.

Folded layout: with R rows a vector of scores holds 16 / R keys, lane = key * R + row; acc is [R, head_size] float32.
Rows past the last real one repeat it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline, part
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.decode_dot import VALUE_COLUMNS, add_values, score_vector
from numba_prefix.cpu.kernel.paged_kv import item_bytes, list_rows, load_any, load_query, narrow_row
from numba_prefix.cpu.kernel.row_state import (
    is_last_split,
    lse_of_column,
    out_address,
    partial_address,
    range_of_lanes,
    set_lane,
    store_lse,
)
from numba_prefix.cpu.kernel.scores import gather_entries, score_column, weigh_column
from numba_prefix.cpu.kernel.sizes import DECODE_N, VECTOR_BYTES
from numba_prefix.cpu.simd.memory import (
    any_lane,
    fold_lanes,
    is_not_finite,
    load1_f32,
    load1_i64,
    load_f32,
    load_i32,
    load_i64,
    splat_f32,
    splat_i32,
    store1_i32,
    store_f32,
)
from numba_prefix.rules import tiling
from numba_prefix.rules.elementwise import multiply_add, where
from numba_prefix.rules.softmax import add_part, normalize, rescale, running_max, shift_of

WIDTH_1, WIDTH_4, WIDTH_8 = (16 * VALUE_COLUMNS[rows] for rows in (1, 4, 8))
ZERO = np.float32(0.0)
NEG_INF = np.float32(-np.inf)


@inline
def fold_max(lanes: Any, fold_rows: Any) -> Any:
    """The max over the lanes of each row, in all of them."""
    lanes = running_max(lanes, fold_lanes(lanes, 8))
    if fold_rows <= 4:
        lanes = running_max(lanes, fold_lanes(lanes, 4))
    if fold_rows == 1:
        lanes = running_max(lanes, fold_lanes(lanes, 2))
        lanes = running_max(lanes, fold_lanes(lanes, 1))
    return lanes


@inline
def fold_sum(lanes: Any, fold_rows: Any) -> Any:
    lanes = lanes + fold_lanes(lanes, 8)
    if fold_rows <= 4:
        lanes = lanes + fold_lanes(lanes, 4)
    if fold_rows == 1:
        lanes = lanes + fold_lanes(lanes, 2)
        lanes = lanes + fold_lanes(lanes, 1)
    return lanes


@part
def start_few(params: Any, sequence: Any, runs: Any, rows: Any, fold_rows: Any, kv_head: Any, scratch: Any) -> None:
    """Query rows [R, head_size] as float32 at Q_T, what the rules need in all 16 lanes, and an empty state."""
    head_size, pitch = params.head_size, params.row_pitch
    for lane in range(16):
        row = lane & (fold_rows - 1)
        source = set_lane(params, sequence, runs, min(row, rows - 1), kv_head, lane, scratch)
        store1_i32(scratch + params.kv_lane_offset + 4 * lane, np.int32(lane // fold_rows))
        if lane < fold_rows:
            load_query(params, source, scratch + params.q_t_offset + row * pitch)
            for i in range(0, head_size, 16):
                store_f32(scratch + params.acc_offset + row * pitch + 4 * i, splat_f32(ZERO))
    store_f32(scratch + params.state_offset, splat_f32(NEG_INF))
    store_f32(scratch + params.state_offset + VECTOR_BYTES, splat_f32(ZERO))


@part
def score_few(
    params: Any,
    fold_rows: Any,
    is_edge: Any,
    kv_pos: Any,
    num_keys: Any,
    keys: Any,
    scratch: Any,
) -> None:
    """Products, rule chain and weights of num_keys keys; leaves alpha. Asks for the values that come next: rows of one head
    are too far apart for the hardware to see them coming."""
    s, values = scratch + params.s_offset, scratch + params.v_list_offset
    step = 16 // fold_rows
    num_vectors = tiling.ceil_div(num_keys, step)
    code, depth = variant(params, fold_rows), params.head_size >> 4
    for i in range(num_vectors):
        at = 8 * i * step
        score_vector(
            code, keys + at, values + at, scratch + params.q_t_offset, params.row_pitch, depth, s + i * VECTOR_BYTES
        )
    origin = load_i32(scratch + params.bias_pos_offset)
    begin, end = load_i32(scratch + params.begin_offset), load_i32(scratch + params.end_offset)
    # The lanes of a vector that is not full are keys past the block: of the same sequence, where its keys are not all held.
    tile_end = splat_i32(kv_pos + num_keys)
    end = where(end < tile_end, end, tile_end)
    slope, kv_lane = load_f32(scratch + params.slopes_offset), load_i32(scratch + params.kv_lane_offset)
    entries = scratch + params.entries_offset
    if params.bias >= c.TEMPLATE_LINEAR:
        base = load_i64(scratch + params.mask_base_offset)
        q_pos = load_i32(scratch + params.q_pos_offset)
        gather_entries(params, base, q_pos, kv_pos, kv_lane, step, num_vectors, entries, entries)
    m_old = load_f32(scratch + params.state_offset)
    is_partial = num_vectors * step != num_keys
    m_i = score_column(
        params, is_edge or is_partial, s, entries, num_vectors, kv_pos, step, kv_lane, params.qk_scale, slope, origin, begin, end,
        m_old,
    )  # fmt: skip
    m_i = fold_max(m_i, fold_rows)
    shift = shift_of(m_i)
    unit_log2 = params.unit_log2
    alpha = rescale(m_old, shift, unit_log2)
    l_i = multiply_add(
        load_f32(scratch + params.state_offset + VECTOR_BYTES), alpha, weigh_column(s, num_vectors, shift, unit_log2)
    )
    store_f32(scratch + params.state_offset, m_i)
    store_f32(scratch + params.state_offset + VECTOR_BYTES, l_i)
    store_f32(scratch + params.alpha_offset, alpha)


@inline
def variant(params: Any, fold_rows: Any) -> Any:
    """cpu/kernel/decode_dot.py's number of the micro-kernel for these rows and this dtype."""
    return (0 if fold_rows == 1 else 3 if fold_rows == 4 else 6) + params.dtype


@part
def output_few(params: Any, fold_rows: Any, num_keys: Any, next_keys: Any, scratch: Any) -> None:
    """Asks for the keys of the next block meanwhile."""
    head_size, item = params.head_size, item_bytes(params.dtype)
    width = WIDTH_1 if fold_rows == 1 else WIDTH_4 if fold_rows == 4 else WIDTH_8
    code = variant(params, fold_rows)
    wide = head_size // width * width
    for i in range(0, wide, width):
        add_values(
            code, scratch + params.v_list_offset, next_keys, i * item, scratch + params.s_offset, num_keys,
            scratch + params.acc_offset + 4 * i, params.row_pitch, scratch + params.alpha_offset, True,
        )  # fmt: skip
    for i in range(wide, head_size, 16):
        add_values(
            code, scratch + params.v_list_offset, next_keys, i * item, scratch + params.s_offset, num_keys,
            scratch + params.acc_offset + 4 * i, params.row_pitch, scratch + params.alpha_offset, False,
        )  # fmt: skip


@part
def has_special_few(params: Any, num_keys: Any, scratch: Any) -> Any:
    item = item_bytes(params.dtype)
    for j in range(num_keys):
        source = load1_i64(scratch + params.v_list_offset + 8 * j)
        for i in range(0, params.head_size, 16):
            if any_lane(is_not_finite(load_any(params.dtype, source + i * item))):
                return True
    return False


@part
def careful_few(params: Any, fold_rows: Any, kv_pos: Any, num_keys: Any, scratch: Any) -> None:
    """As output_few where values are not finite: a weight of zero must not meet them. The same sums, the same bits."""
    item = item_bytes(params.dtype)
    for row in range(fold_rows):
        begin, _, _, end = range_of_lanes(params, row, row, scratch)
        first, stop = tiling.keys_between(begin, end, kv_pos, num_keys)
        alpha = splat_f32(load1_f32(scratch + params.alpha_offset + 4 * row))
        for i in range(0, params.head_size, 16):
            total = splat_f32(ZERO)
            for j in range(first, stop):
                value = load_any(params.dtype, load1_i64(scratch + params.v_list_offset + 8 * j) + i * item)
                weight = splat_f32(load1_f32(scratch + params.s_offset + 4 * (j * fold_rows + row)))
                total = multiply_add(value, weight, total)
            acc = scratch + params.acc_offset + row * params.row_pitch + 4 * i
            store_f32(acc, multiply_add(alpha, load_f32(acc), total))


@part
def attend_few(
    params: Any,
    entry: Any,
    sequence: Any,
    runs: Any,
    fold_rows: Any,
    table: Any,
    k: Any,
    v: Any,
    scratch: Any,
) -> None:
    """All keys of one work item, a block of them for each of its heads in turn: k and v are the first head's. Key rows are
    listed a turn ahead, so that they can be asked for in time."""
    kv_idx, n_end, head = entry[tiling.N_BEGIN], entry[tiling.N_END], 0
    kv_pos, num_keys = tiling.key_tile(runs, sequence, kv_idx, n_end, DECODE_N)
    keys = scratch + params.k_list_offset
    next_keys = keys + 8 * DECODE_N
    list_rows(params, k, params.k_block_stride, params.k_slot_stride, table, kv_pos, num_keys, DECODE_N, keys)
    while kv_idx < n_end:
        own = scratch + head * params.head_bytes
        values, v_head = own + params.v_list_offset, v + head * params.v_head_stride
        list_rows(
            params, v_head, params.v_block_stride, params.v_slot_stride, table, kv_pos, num_keys, DECODE_N, values
        )
        next_pos, next_count = kv_pos, num_keys
        head += 1
        if head == params.item_heads:
            head = 0
            kv_idx += num_keys
            next_pos, next_count = tiling.key_tile(runs, sequence, kv_idx, n_end, DECODE_N)
        k_head = k + head * params.k_head_stride
        list_rows(
            params,
            k_head,
            params.k_block_stride,
            params.k_slot_stride,
            table,
            next_pos,
            next_count,
            DECODE_N,
            next_keys,
        )
        _, full_begin, full_end, _ = range_of_lanes(params, 0, fold_rows - 1, own)
        is_edge = tiling.is_edge(full_begin, full_end, kv_pos, num_keys)
        score_few(params, fold_rows, is_edge, kv_pos, num_keys, keys, own)
        if is_edge and has_special_few(params, num_keys, own):
            careful_few(params, fold_rows, kv_pos, num_keys, own)
        else:
            output_few(params, fold_rows, num_keys, next_keys, own)
        keys, next_keys = next_keys, keys
        kv_pos, num_keys = next_pos, next_count


@part
def store_partial_few(params: Any, place: Any, fold_rows: Any, scratch: Any) -> None:
    """m_i, l_i, acc."""
    store_f32(place, load_f32(scratch + params.state_offset))
    store_f32(place + VECTOR_BYTES, load_f32(scratch + params.state_offset + VECTOR_BYTES))
    for row in range(fold_rows):
        target = place + 2 * VECTOR_BYTES + 4 * row * params.head_size
        for i in range(0, params.head_size, 16):
            store_f32(target + 4 * i, load_f32(scratch + params.acc_offset + row * params.row_pitch + 4 * i))


@part
def merge_partials_few(params: Any, entry: Any, kv_head: Any, rows: Any, fold_rows: Any, scratch: Any) -> None:
    """The states of all splits, in order of their keys whoever came last."""
    num_splits = entry[tiling.NUM_SPLITS]
    m_i = splat_f32(NEG_INF)
    for split_idx in range(num_splits):
        m_i = running_max(m_i, load_f32(partial_address(params, entry, split_idx, kv_head, rows)))
    shift = shift_of(m_i)
    l_i = splat_f32(ZERO)
    for split_idx in range(num_splits):
        place = partial_address(params, entry, split_idx, kv_head, rows)
        alpha = rescale(load_f32(place), shift, params.unit_log2)
        store_f32(scratch + params.alpha_offset, alpha)
        l_i = multiply_add(load_f32(place + VECTOR_BYTES), alpha, l_i)
        for row in range(fold_rows):
            factor = splat_f32(load1_f32(scratch + params.alpha_offset + 4 * row))
            source = place + 2 * VECTOR_BYTES + 4 * row * params.head_size
            for i in range(0, params.head_size, 16):
                acc = scratch + params.acc_offset + row * params.row_pitch + 4 * i
                total = load_f32(acc) if split_idx > 0 else splat_f32(ZERO)
                store_f32(acc, add_part(total, load_f32(source + 4 * i), factor))
    store_f32(scratch + params.state_offset, m_i)
    store_f32(scratch + params.state_offset + VECTOR_BYTES, l_i)


@part
def store_output_few(params: Any, sequence: Any, rows: Any, fold_rows: Any, kv_head: Any, scratch: Any) -> None:
    l_i = fold_sum(load_f32(scratch + params.state_offset + VECTOR_BYTES), fold_rows)
    sums, log_sums = scratch + params.state_offset + VECTOR_BYTES, scratch + params.alpha_offset
    store_f32(sums, l_i)
    store_f32(log_sums, lse_of_column(params, 0, load_f32(scratch + params.state_offset), l_i, scratch))
    for row in range(rows):
        acc = scratch + params.acc_offset + row * params.row_pitch
        divisor = splat_f32(load1_f32(sums + 4 * row))
        for i in range(0, params.head_size, 16):
            store_f32(acc + 4 * i, normalize(load_f32(acc + 4 * i), divisor))
        narrow_row(params.out_dtype, acc, out_address(params, sequence, row, kv_head), params.head_size)
        store_lse(params, sequence, row, kv_head, load1_f32(log_sums + 4 * row))


@part
def finish_decode(
    params: Any, entry: Any, sequence: Any, rows: Any, fold_rows: Any, kv_head: Any, scratch: Any
) -> None:
    """The state of one head's tile, or split of it, to output rows or to where the last of its splits finds it."""
    if entry[tiling.NUM_SPLITS] > 1:
        place = partial_address(params, entry, entry[tiling.SPLIT_IDX], kv_head, rows)
        store_partial_few(params, place, fold_rows, scratch)
        if not is_last_split(params, entry, kv_head):
            return
        merge_partials_few(params, entry, kv_head, rows, fold_rows, scratch)
    store_output_few(params, sequence, rows, fold_rows, kv_head, scratch)


@part
def decode_item(
    params: Any,
    entry: Any,
    sequence: Any,
    runs: Any,
    rows: Any,
    fold_rows: Any,
    kv_head: Any,
    table: Any,
    k: Any,
    v: Any,
    scratch: Any,
) -> None:
    """One work item of a sequence with few rows: item_heads kv heads from kv_head on, whose keys are taken in turns."""
    for head in range(params.item_heads):
        start_few(params, sequence, runs, rows, fold_rows, kv_head + head, scratch + head * params.head_bytes)
    attend_few(params, entry, sequence, runs, fold_rows, table, k, v, scratch)
    for head in range(params.item_heads):
        finish_decode(params, entry, sequence, rows, fold_rows, kv_head + head, scratch + head * params.head_bytes)
