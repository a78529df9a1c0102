"""Decode: the tile loop for a sequence's few query rows (tiling.fold_rows). Keys and values are
read once, where they lie.

Folded layout: with R rows a vector of scores holds 16 / R keys, lane = key * R + row; acc is [R,
head_size] float32. Rows past the last real one repeat it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import device_function, inline
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.decode_dot import FOLD_ROWS, NUM_DTYPES, VALUE_PANELS, add_values, score_vector
from numba_prefix.cpu.kernel.paged_kv import item_bytes, list_rows, load_any, load_query, narrow_row
from numba_prefix.cpu.kernel.row_state import (
    is_last_split,
    lse_of_panel,
    out_address,
    partial_address,
    range_of_lanes,
    rows_of_panel,
    set_lane,
    store_lse,
)
from numba_prefix.cpu.kernel.scores import exp_panel, gather_entries, score_panel
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

WIDTH_1, WIDTH_4, WIDTH_8 = (16 * VALUE_PANELS[rows] for rows in FOLD_ROWS)
ZERO = np.float32(0.0)
NEG_INF = np.float32(-np.inf)


@inline
def fold_max(lanes: Any, fold_rows: Any) -> Any:
    """The max over the lanes of each row, in all its lanes."""
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


@device_function
def start_decode(
    params: Any, sequence: Any, runs: Any, rows: Any, fold_rows: Any, kv_head: Any, scratch_ptr: Any
) -> None:
    """Lays out query rows [R, head_size] as float32, what the rules need in all 16 lanes, and an
    empty state."""
    head_size, pitch = params.head_size, params.row_pitch
    for lane in range(16):
        row = lane & (fold_rows - 1)
        source_ptr = set_lane(params, sequence, runs, min(row, rows - 1), kv_head, lane, scratch_ptr)
        store1_i32(scratch_ptr + params.kv_lane_offset + 4 * lane, np.int32(lane // fold_rows))
        if lane < fold_rows:
            load_query(params, source_ptr, scratch_ptr + params.q_t_offset + row * pitch)
            for i in range(0, head_size, 16):
                store_f32(scratch_ptr + params.acc_offset + row * pitch + 4 * i, splat_f32(ZERO))
    store_f32(scratch_ptr + params.state_offset, splat_f32(NEG_INF))
    store_f32(scratch_ptr + params.state_offset + VECTOR_BYTES, splat_f32(ZERO))


@device_function
def score_decode(
    params: Any,
    fold_rows: Any,
    is_edge: Any,
    kv_pos: Any,
    num_keys: Any,
    k_list_ptr: Any,
    scratch_ptr: Any,
) -> None:
    """Products, rule chain and probabilities of num_keys keys; leaves alpha. Asks for the values
    that come next: rows of one head are too far apart for the hardware to see them coming."""
    s_ptr, v_list_ptr = scratch_ptr + params.s_offset, scratch_ptr + params.v_list_offset
    q_ptr, entries_ptr = scratch_ptr + params.q_t_offset, scratch_ptr + params.entries_offset
    state_ptr = scratch_ptr + params.state_offset
    step = 16 // fold_rows
    num_vectors = tiling.ceil_div(num_keys, step)
    code, depth = micro_kernel_code(params, fold_rows), params.head_size >> 4
    for i in range(num_vectors):
        k_at_ptr, v_at_ptr = k_list_ptr + 8 * i * step, v_list_ptr + 8 * i * step
        score_vector(code, k_at_ptr, v_at_ptr, q_ptr, params.row_pitch, depth, s_ptr + i * VECTOR_BYTES)
    slope, bias_pos, begin, end = rows_of_panel(params, 0, scratch_ptr)
    # A vector that is not full has lanes for keys past the tile: of the same sequence, where not
    # all its keys are held.
    tile_end = splat_i32(kv_pos + num_keys)
    rows = slope, bias_pos, begin, where(end < tile_end, end, tile_end)
    keys = kv_pos, step, load_i32(scratch_ptr + params.kv_lane_offset)
    if params.bias >= c.TEMPLATE_LINEAR:
        mask_ptrs = load_i64(scratch_ptr + params.mask_base_offset)
        q_pos = load_i32(scratch_ptr + params.q_pos_offset)
        gather_entries(params, mask_ptrs, q_pos, keys, num_vectors, entries_ptr, entries_ptr)
    m_old = load_f32(state_ptr)
    is_partial = num_vectors * step != num_keys
    m_i = score_panel(params, is_edge or is_partial, s_ptr, entries_ptr, num_vectors, keys, rows, m_old)
    m_i = fold_max(m_i, fold_rows)
    shift = shift_of(m_i)
    alpha = rescale(m_old, shift, params.unit_log2)
    total = exp_panel(s_ptr, num_vectors, shift, params.unit_log2)
    store_f32(state_ptr, m_i)
    store_f32(state_ptr + VECTOR_BYTES, multiply_add(load_f32(state_ptr + VECTOR_BYTES), alpha, total))
    store_f32(scratch_ptr + params.alpha_offset, alpha)


@inline
def micro_kernel_code(params: Any, fold_rows: Any) -> Any:
    """The number of the micro-kernel for these rows and this dtype (decode_dot.py)."""
    place = 0 if fold_rows == FOLD_ROWS[0] else 1 if fold_rows == FOLD_ROWS[1] else 2
    return place * NUM_DTYPES + params.kv_dtype


@device_function
def output_decode(params: Any, fold_rows: Any, num_keys: Any, next_k_list_ptr: Any, scratch_ptr: Any) -> None:
    """The output product; asks for the keys of the next tile meanwhile."""
    head_size, item, pitch = params.head_size, item_bytes(params.kv_dtype), params.row_pitch
    width = WIDTH_1 if fold_rows == 1 else WIDTH_4 if fold_rows == 4 else WIDTH_8
    code = micro_kernel_code(params, fold_rows)
    v_list_ptr, p_ptr = scratch_ptr + params.v_list_offset, scratch_ptr + params.s_offset
    acc_ptr, alpha_ptr = scratch_ptr + params.acc_offset, scratch_ptr + params.alpha_offset
    wide = head_size // width * width
    for i in range(0, wide, width):
        to_ptr = acc_ptr + 4 * i
        add_values(code, v_list_ptr, next_k_list_ptr, i * item, p_ptr, num_keys, to_ptr, pitch, alpha_ptr, True)
    for i in range(wide, head_size, 16):
        to_ptr = acc_ptr + 4 * i
        add_values(code, v_list_ptr, next_k_list_ptr, i * item, p_ptr, num_keys, to_ptr, pitch, alpha_ptr, False)


@device_function
def has_non_finite_values(params: Any, num_keys: Any, scratch_ptr: Any) -> Any:
    item = item_bytes(params.kv_dtype)
    for j in range(num_keys):
        source_ptr = load1_i64(scratch_ptr + params.v_list_offset + 8 * j)
        for i in range(0, params.head_size, 16):
            if any_lane(is_not_finite(load_any(params.kv_dtype, source_ptr + i * item))):
                return True
    return False


@device_function
def output_non_finite_decode(params: Any, fold_rows: Any, kv_pos: Any, num_keys: Any, scratch_ptr: Any) -> None:
    """The output product with values that are not finite: a probability of 0 must not meet them.
    The same sums, the same bits."""
    item = item_bytes(params.kv_dtype)
    for row in range(fold_rows):
        begin, _, _, end = range_of_lanes(params, row, row, scratch_ptr)
        first, stop = tiling.keys_between(begin, end, kv_pos, num_keys)
        alpha = splat_f32(load1_f32(scratch_ptr + params.alpha_offset + 4 * row))
        for i in range(0, params.head_size, 16):
            total = splat_f32(ZERO)
            for j in range(first, stop):
                value = load_any(params.kv_dtype, load1_i64(scratch_ptr + params.v_list_offset + 8 * j) + i * item)
                p = splat_f32(load1_f32(scratch_ptr + params.s_offset + 4 * (j * fold_rows + row)))
                total = multiply_add(value, p, total)
            acc_ptr = scratch_ptr + params.acc_offset + row * params.row_pitch + 4 * i
            store_f32(acc_ptr, multiply_add(alpha, load_f32(acc_ptr), total))


@inline
def blocks_of_head(blocks: Any, head_stride: Any, head: Any) -> Any:
    """Blocks of the kv head that comes `head` heads after that of `blocks`."""
    return blocks[0] + head * head_stride, blocks[1], blocks[2], blocks[3]


@device_function
def attend_decode(
    params: Any, work_item: Any, sequence: Any, runs: Any, fold_rows: Any, blocks: Any, scratch_ptr: Any
) -> None:
    """Attends to all keys of one work item, a key tile for each of its heads in turn. Key rows are
    listed a turn ahead, so that they can be asked for in time."""
    k_blocks, v_blocks = blocks
    kv_idx, n_end, head = work_item[tiling.N_BEGIN], work_item[tiling.N_END], 0
    kv_pos, num_keys = tiling.key_tile(runs, sequence, kv_idx, n_end, DECODE_N)
    k_list_ptr = scratch_ptr + params.k_list_offset
    next_k_list_ptr = k_list_ptr + 8 * DECODE_N
    list_rows(params, k_blocks, kv_pos, num_keys, DECODE_N, k_list_ptr)
    while kv_idx < n_end:
        head_ptr = scratch_ptr + head * params.head_bytes
        v_of_head = blocks_of_head(v_blocks, params.v_head_stride, head)
        list_rows(params, v_of_head, kv_pos, num_keys, DECODE_N, head_ptr + params.v_list_offset)
        next_pos, next_count = kv_pos, num_keys
        head += 1
        if head == params.item_heads:
            head = 0
            kv_idx += num_keys
            next_pos, next_count = tiling.key_tile(runs, sequence, kv_idx, n_end, DECODE_N)
        k_of_head = blocks_of_head(k_blocks, params.k_head_stride, head)
        list_rows(params, k_of_head, next_pos, next_count, DECODE_N, next_k_list_ptr)
        _, full_begin, full_end, _ = range_of_lanes(params, 0, fold_rows - 1, head_ptr)
        is_edge = tiling.is_edge(full_begin, full_end, kv_pos, num_keys)
        score_decode(params, fold_rows, is_edge, kv_pos, num_keys, k_list_ptr, head_ptr)
        if is_edge and has_non_finite_values(params, num_keys, head_ptr):
            output_non_finite_decode(params, fold_rows, kv_pos, num_keys, head_ptr)
        else:
            output_decode(params, fold_rows, num_keys, next_k_list_ptr, head_ptr)
        k_list_ptr, next_k_list_ptr = next_k_list_ptr, k_list_ptr
        kv_pos, num_keys = next_pos, next_count


@device_function
def store_partial_decode(params: Any, partial_ptr: Any, fold_rows: Any, scratch_ptr: Any) -> None:
    """m_i, l_i, acc."""
    store_f32(partial_ptr, load_f32(scratch_ptr + params.state_offset))
    store_f32(partial_ptr + VECTOR_BYTES, load_f32(scratch_ptr + params.state_offset + VECTOR_BYTES))
    for row in range(fold_rows):
        target_ptr = partial_ptr + 2 * VECTOR_BYTES + 4 * row * params.head_size
        for i in range(0, params.head_size, 16):
            store_f32(target_ptr + 4 * i, load_f32(scratch_ptr + params.acc_offset + row * params.row_pitch + 4 * i))


@device_function
def merge_partials_decode(
    params: Any, work_item: Any, kv_head: Any, rows: Any, fold_rows: Any, scratch_ptr: Any
) -> None:
    """Merges the states of all splits, in order of their keys whichever was done last."""
    num_splits = work_item[tiling.NUM_SPLITS]
    m_i = splat_f32(NEG_INF)
    for split_idx in range(num_splits):
        m_i = running_max(m_i, load_f32(partial_address(params, work_item, split_idx, kv_head, rows)))
    shift = shift_of(m_i)
    l_i = splat_f32(ZERO)
    for split_idx in range(num_splits):
        partial_ptr = partial_address(params, work_item, split_idx, kv_head, rows)
        alpha = rescale(load_f32(partial_ptr), shift, params.unit_log2)
        store_f32(scratch_ptr + params.alpha_offset, alpha)
        l_i = multiply_add(load_f32(partial_ptr + VECTOR_BYTES), alpha, l_i)
        for row in range(fold_rows):
            factor = splat_f32(load1_f32(scratch_ptr + params.alpha_offset + 4 * row))
            source_ptr = partial_ptr + 2 * VECTOR_BYTES + 4 * row * params.head_size
            for i in range(0, params.head_size, 16):
                acc_ptr = scratch_ptr + params.acc_offset + row * params.row_pitch + 4 * i
                total = load_f32(acc_ptr) if split_idx > 0 else splat_f32(ZERO)
                store_f32(acc_ptr, add_part(total, load_f32(source_ptr + 4 * i), factor))
    store_f32(scratch_ptr + params.state_offset, m_i)
    store_f32(scratch_ptr + params.state_offset + VECTOR_BYTES, l_i)


@device_function
def store_output_decode(params: Any, sequence: Any, rows: Any, fold_rows: Any, kv_head: Any, scratch_ptr: Any) -> None:
    l_i = fold_sum(load_f32(scratch_ptr + params.state_offset + VECTOR_BYTES), fold_rows)
    sums_ptr, lse_ptr = scratch_ptr + params.state_offset + VECTOR_BYTES, scratch_ptr + params.alpha_offset
    store_f32(sums_ptr, l_i)
    store_f32(lse_ptr, lse_of_panel(params, 0, load_f32(scratch_ptr + params.state_offset), l_i, scratch_ptr))
    for row in range(rows):
        acc_ptr = scratch_ptr + params.acc_offset + row * params.row_pitch
        divisor = splat_f32(load1_f32(sums_ptr + 4 * row))
        for i in range(0, params.head_size, 16):
            store_f32(acc_ptr + 4 * i, normalize(load_f32(acc_ptr + 4 * i), divisor))
        narrow_row(params.out_dtype, acc_ptr, out_address(params, sequence, row, kv_head), params.head_size)
        store_lse(params, sequence, row, kv_head, load1_f32(lse_ptr + 4 * row))


@device_function
def finish_decode(
    params: Any, work_item: Any, sequence: Any, rows: Any, fold_rows: Any, kv_head: Any, scratch_ptr: Any
) -> None:
    """Brings the state of one head's tile to output rows, or that of a split to where the last of
    its splits finds it."""
    if work_item[tiling.NUM_SPLITS] > 1:
        partial_ptr = partial_address(params, work_item, work_item[tiling.SPLIT_IDX], kv_head, rows)
        store_partial_decode(params, partial_ptr, fold_rows, scratch_ptr)
        if not is_last_split(params, work_item, kv_head):
            return
        merge_partials_decode(params, work_item, kv_head, rows, fold_rows, scratch_ptr)
    store_output_decode(params, sequence, rows, fold_rows, kv_head, scratch_ptr)


@device_function
def decode_item(
    params: Any,
    work_item: Any,
    sequence: Any,
    runs: Any,
    rows: Any,
    fold_rows: Any,
    kv_head: Any,
    blocks: Any,
    scratch_ptr: Any,
) -> None:
    """One work item of a sequence with few rows: item_heads kv heads from kv_head on, whose keys
    are taken in turns."""
    for head in range(params.item_heads):
        start_decode(params, sequence, runs, rows, fold_rows, kv_head + head, scratch_ptr + head * params.head_bytes)
    attend_decode(params, work_item, sequence, runs, fold_rows, blocks, scratch_ptr)
    for head in range(params.item_heads):
        head_ptr = scratch_ptr + head * params.head_bytes
        finish_decode(params, work_item, sequence, rows, fold_rows, kv_head + head, head_ptr)
