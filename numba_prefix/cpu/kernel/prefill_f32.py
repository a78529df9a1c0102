"""Prefill on path `vector`: panels of 16 query rows against keys and values that are widened to
float32.

A strip is up to NV neighbouring panels, which one call of a micro-kernel multiplies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import device_function, inline
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.paged_kv import (
    has_non_finite,
    item_bytes,
    list_rows,
    load_query,
    load_rows,
    prefetch_rows,
)
from numba_prefix.cpu.kernel.prefill_f32_gemm import (
    MR,
    NV,
    output_product,
    output_product_1,
    score_product,
    score_product_1,
)
from numba_prefix.cpu.kernel.row_state import range_of_lanes, rows_of_panel, set_lane
from numba_prefix.cpu.kernel.scores import exp_panel, gather_entries, score_panel
from numba_prefix.cpu.kernel.sizes import BLOCK_N, FLOAT, PANEL_S_BYTES, VECTOR_BYTES
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
# Scores are summed over this many dimensions at once (half as many for small heads): 0.6 to 0.8 of
# the rounding error of one chain, for one addition in SUM_DIMS.
SUM_DIMS = 64


@device_function
def load_queries(
    params: Any, sequence: Any, runs: Any, first_row: Any, rows: Any, kv_head: Any, scratch_ptr: Any
) -> None:
    """Lays out query rows as panels [head_size, 16], and what the rules need of each row. Lanes
    past the last row repeat it, so that they never widen a key range."""
    pitch = params.row_pitch
    depth = round_up(params.head_size, 16)
    staging_ptr = scratch_ptr + params.staging_offset
    for lane in range(lane_rows(rows)):
        source_ptr = set_lane(params, sequence, runs, first_row + min(lane, rows - 1), kv_head, lane, scratch_ptr)
        load_query(params, source_ptr, staging_ptr + (lane & 15) * pitch)
        if lane & 15 == 15:
            panel = scratch_ptr + params.q_t_offset + (lane >> 4) * depth * VECTOR_BYTES
            for i in range(0, depth, 16):
                transpose_block(staging_ptr + 4 * i, pitch, panel + i * VECTOR_BYTES, VECTOR_BYTES)


@inline
def apply_rules(
    params: Any, panel: Any, s_ptr: Any, is_edge: Any, kv_pos: Any, num_keys: Any, m_old: Any, scratch_ptr: Any
) -> Any:
    """Turns the products of one panel into scores; returns the new running max."""
    keys, entries_ptr = (kv_pos, 1, splat_i32(0)), scratch_ptr + params.entries_offset
    if params.bias >= c.TEMPLATE_LINEAR:
        mask_ptrs = load_i64(scratch_ptr + params.mask_base_offset + 2 * panel * VECTOR_BYTES)
        q_pos = load_i32(scratch_ptr + params.q_pos_offset + panel * VECTOR_BYTES)
        spare_ptr = scratch_ptr + params.staging_offset
        gather_entries(params, mask_ptrs, q_pos, keys, num_keys, entries_ptr, spare_ptr)
    rows = rows_of_panel(params, panel, scratch_ptr)
    return score_panel(params, is_edge, s_ptr, entries_ptr, num_keys, keys, rows, m_old)


@device_function
def softmax_panel(
    params: Any, panel: Any, s_ptr: Any, is_edge: Any, kv_pos: Any, num_keys: Any, scratch_ptr: Any
) -> None:
    """Turns the products of one panel into probabilities; leaves alpha for the output product."""
    state_ptr = scratch_ptr + params.state_offset + 2 * panel * VECTOR_BYTES
    m_old = load_f32(state_ptr)
    m_i = apply_rules(params, panel, s_ptr, is_edge, kv_pos, num_keys, m_old, scratch_ptr)
    shift = shift_of(m_i)
    unit_log2 = params.unit_log2
    alpha = rescale(m_old, shift, unit_log2)
    l_i = multiply_add(load_f32(state_ptr + VECTOR_BYTES), alpha, exp_panel(s_ptr, num_keys, shift, unit_log2))
    store_f32(state_ptr, m_i)
    store_f32(state_ptr + VECTOR_BYTES, l_i)
    store_f32(scratch_ptr + params.alpha_offset + panel * VECTOR_BYTES, alpha)


@device_function
def output_non_finite(
    params: Any, panel: Any, s_ptr: Any, v_rows_ptr: Any, kv_pos: Any, num_keys: Any, scratch_ptr: Any
) -> None:
    """The output product of one panel with values that are not finite: a probability of 0 must not
    meet them. Sums in the order of the micro-kernel, so that rows which do not see such a value get
    the same bits."""
    _, _, begin, end = rows_of_panel(params, panel, scratch_ptr)
    alpha = load_f32(scratch_ptr + params.alpha_offset + panel * VECTOR_BYTES)
    depth = round_up(params.head_size, 16)
    acc_ptr = scratch_ptr + params.acc_offset + panel * depth * VECTOR_BYTES
    for i in range(depth):
        total = splat_f32(ZERO)
        for j in range(num_keys):
            value = splat_f32(load1_f32(v_rows_ptr + j * params.row_pitch + 4 * i))
            seen = multiply_add(load_f32(s_ptr + j * VECTOR_BYTES), value, total)
            total = where(is_visible(splat_i32(kv_pos + j), begin, end), seen, total)
        store_f32(acc_ptr + i * VECTOR_BYTES, multiply_add(alpha, load_f32(acc_ptr + i * VECTOR_BYTES), total))


@device_function
def score_strip(params: Any, panel: Any, width: Any, k_rows_ptr: Any, num_keys: Any, scratch_ptr: Any) -> None:
    """The score product of `width` panels: s [panel, key, 16] = keys . queries."""
    head_size, pitch, panel_q = params.head_size, params.row_pitch, round_up(params.head_size, 16) * VECTOR_BYTES
    s_ptr = scratch_ptr + params.s_offset
    depth = SUM_DIMS if head_size >= 2 * SUM_DIMS else SUM_DIMS // 2
    for d in range(0, head_size, depth):
        q_ptr = scratch_ptr + params.q_t_offset + panel * panel_q + d * VECTOR_BYTES
        steps, is_later = min(depth, head_size - d), min(d, 1)
        for j in range(0, num_keys, MR):
            k_ptr, to_ptr = k_rows_ptr + j * pitch + FLOAT * d, s_ptr + j * VECTOR_BYTES
            if width == 1:
                score_product_1(k_ptr, pitch, q_ptr, panel_q, steps, to_ptr, PANEL_S_BYTES, is_later)
            else:
                score_product(k_ptr, pitch, q_ptr, panel_q, steps, to_ptr, PANEL_S_BYTES, is_later)


@device_function
def output_strip(params: Any, panel: Any, width: Any, v_rows_ptr: Any, num_keys: Any, scratch_ptr: Any) -> None:
    """The output product of `width` panels: acc [panel, head_size, 16] = alpha * acc + values .
    probabilities."""
    pitch, depth = params.row_pitch, round_up(params.head_size, 16)
    panel_acc = depth * VECTOR_BYTES
    s_ptr, acc_ptr = scratch_ptr + params.s_offset, scratch_ptr + params.acc_offset + panel * panel_acc
    alpha_ptr = scratch_ptr + params.alpha_offset + panel * VECTOR_BYTES
    for i in range(0, depth, MR):
        v_ptr, to_ptr = v_rows_ptr + FLOAT * i, acc_ptr + i * VECTOR_BYTES
        if width == 1:
            output_product_1(v_ptr, pitch, s_ptr, PANEL_S_BYTES, num_keys, to_ptr, panel_acc, alpha_ptr)
        else:
            output_product(v_ptr, pitch, s_ptr, PANEL_S_BYTES, num_keys, to_ptr, panel_acc, alpha_ptr)


@device_function
def attend_strip(
    params: Any,
    panel: Any,
    width: Any,
    first: Any,
    kv_pos: Any,
    num_keys: Any,
    is_edge: Any,
    non_finite: Any,
    scratch_ptr: Any,
) -> None:
    """Attends a strip of `width` panels to num_keys keys at kv_pos, which are in scratch from row
    `first` on."""
    k_rows_ptr = scratch_ptr + params.k_rows_offset + first * params.row_pitch
    v_rows_ptr = scratch_ptr + params.v_rows_offset + first * params.row_pitch
    s_ptr = scratch_ptr + params.s_offset
    score_strip(params, panel, width, k_rows_ptr, num_keys, scratch_ptr)
    for x in range(width):
        softmax_panel(params, panel + x, s_ptr + x * PANEL_S_BYTES, is_edge, kv_pos, num_keys, scratch_ptr)
    if non_finite and is_edge:
        for x in range(width):
            p_ptr = s_ptr + x * PANEL_S_BYTES
            output_non_finite(params, panel + x, p_ptr, v_rows_ptr, kv_pos, num_keys, scratch_ptr)
    else:
        output_strip(params, panel, width, v_rows_ptr, num_keys, scratch_ptr)


@device_function
def list_next(
    params: Any, sequence: Any, runs: Any, kv_idx: Any, n_end: Any, k_blocks: Any, v_blocks: Any, scratch_ptr: Any
) -> Any:
    """Lists the rows of the key tile that begins at kv_idx; returns how many they are."""
    kv_pos, num_keys = tiling.key_tile(runs, sequence, kv_idx, n_end, BLOCK_N)
    list_rows(params, k_blocks, kv_pos, num_keys, num_keys, scratch_ptr + params.k_list_offset)
    list_rows(params, v_blocks, kv_pos, num_keys, num_keys, scratch_ptr + params.v_list_offset)
    return num_keys


@device_function
def attend_keys(
    params: Any,
    work_item: Any,
    sequence: Any,
    runs: Any,
    num_panels: Any,
    k_blocks: Any,
    v_blocks: Any,
    scratch_ptr: Any,
) -> None:
    """Attends all panels of a tile to the keys of one work item; meanwhile the rows of the next key
    tile come into the cache."""
    row_bytes = params.head_size * item_bytes(params.kv_dtype)
    k_rows_ptr, v_rows_ptr = scratch_ptr + params.k_rows_offset, scratch_ptr + params.v_rows_offset
    k_list_ptr, v_list_ptr = scratch_ptr + params.k_list_offset, scratch_ptr + params.v_list_offset
    kv_idx, n_end = work_item[tiling.N_BEGIN], work_item[tiling.N_END]
    _, tile_full_begin, tile_full_end, _ = range_of_lanes(params, 0, 16 * num_panels - 1, scratch_ptr)
    while kv_idx < n_end:
        kv_pos, num_keys = tiling.key_tile(runs, sequence, kv_idx, n_end, BLOCK_N)
        kv_idx += num_keys
        load_rows(params, k_blocks, kv_pos, num_keys, k_rows_ptr)
        load_rows(params, v_blocks, kv_pos, num_keys, v_rows_ptr)
        non_finite = False
        if tiling.is_edge(tile_full_begin, tile_full_end, kv_pos, num_keys):
            non_finite = has_non_finite(v_rows_ptr, params.row_pitch, num_keys, params.head_size)
        num_next = list_next(params, sequence, runs, kv_idx, n_end, k_blocks, v_blocks, scratch_ptr)
        for panel in range(0, num_panels, NV):
            width = min(NV, num_panels - panel)
            asked = num_next * panel // num_panels
            count = num_next * (panel + width) // num_panels - asked
            prefetch_rows(k_list_ptr + 8 * asked, count, row_bytes)
            prefetch_rows(v_list_ptr + 8 * asked, count, row_bytes)
            lanes = 16 * panel, 16 * (panel + width) - 1
            begin, full_begin, full_end, end = range_of_lanes(params, lanes[0], lanes[1], scratch_ptr)
            first, stop = tiling.keys_between(begin, end, kv_pos, num_keys)
            if first < stop:
                pos, count = kv_pos + first, stop - first
                is_edge = tiling.is_edge(full_begin, full_end, pos, count)
                attend_strip(params, panel, width, first, pos, count, is_edge, non_finite, scratch_ptr)
