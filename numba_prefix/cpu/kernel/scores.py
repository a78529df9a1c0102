"""The rule chain on one panel of scores: scale, bias, visibility, running softmax. One lane is one
query row."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import device_function, inline
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.paged_kv import gather_lanes, item_bytes, load_lanes
from numba_prefix.cpu.kernel.sizes import VECTOR_BYTES
from numba_prefix.cpu.simd.memory import (
    load1_i64,
    load_f32,
    splat_f32,
    splat_i32,
    store_f32,
    store_i64,
    to_i64,
    transpose_block,
)
from numba_prefix.rules.elementwise import where
from numba_prefix.rules.masks import (
    heads_mask_row,
    is_visible,
    left_align_bias,
    linear_bias,
    sqrt_bias,
    template_left_align_bias,
    template_linear_bias,
    template_row,
    template_sqrt_bias,
)
from numba_prefix.rules.softmax import exp_score, running_max

ZERO = np.float32(0.0)
NEG_INF = np.float32(-np.inf)


@inline
def mask_rows(params: Any, mask_ptrs: Any, q_pos: Any, pos: Any) -> Any:
    """Addresses of the rows that hold the entries of these queries and keys, int64 lanes."""
    row = heads_mask_row(q_pos, pos) if params.bias == c.HEADS_MASK else template_row(q_pos, pos)
    return mask_ptrs + to_i64(row) * params.mask_row_stride


@inline
def gather_entries_of(
    dtype: Any, params: Any, mask_ptrs: Any, q_pos: Any, keys: Any, num_vectors: Any, entries_ptr: Any, spare_ptr: Any
) -> None:
    kv_pos, step, kv_lane = keys
    item = item_bytes(dtype)
    is_dense = step == 1 and params.mask_column_stride == item
    i = 0
    while i < num_vectors:
        pos = kv_lane + splat_i32(kv_pos + i * step)
        row_ptrs = mask_rows(params, mask_ptrs, q_pos, pos)
        first = (kv_pos + i) & 127
        if is_dense and i + 16 <= num_vectors and first + 16 <= 128:
            # A row's entries of 16 neighbouring keys are neighbours: 16 loads and a transposition
            # instead of 256 loads.
            store_i64(spare_ptr + 16 * VECTOR_BYTES, row_ptrs)
            for lane in range(16):
                row_ptr = load1_i64(spare_ptr + 16 * VECTOR_BYTES + 8 * lane) + first * item
                store_f32(spare_ptr + lane * VECTOR_BYTES, load_lanes(dtype, row_ptr))
            transpose_block(spare_ptr, VECTOR_BYTES, entries_ptr + i * VECTOR_BYTES, VECTOR_BYTES)
            i += 16
            continue
        entry_ptrs = row_ptrs + to_i64(pos & 127) * params.mask_column_stride
        store_f32(entries_ptr + i * VECTOR_BYTES, gather_lanes(dtype, entry_ptrs))
        i += 1


@device_function
def gather_entries(
    params: Any, mask_ptrs: Any, q_pos: Any, keys: Any, num_vectors: Any, entries_ptr: Any, spare_ptr: Any
) -> None:
    """Loads a given mask's entries for a panel, as float32 [num_vectors, 16]. keys: as of
    score_panel. spare_ptr: room for 18 vectors, where the step of keys is 1."""
    a = params, mask_ptrs, q_pos, keys, num_vectors, entries_ptr, spare_ptr
    dtype = params.mask_dtype
    if dtype == c.FLOAT16:
        gather_entries_of(c.FLOAT16, *a)
    elif dtype == c.BFLOAT16:
        gather_entries_of(c.BFLOAT16, *a)
    else:
        gather_entries_of(c.FLOAT32, *a)


@inline
def score_panel_of(
    bias: Any,
    is_edge: Any,
    qk_scale: Any,
    panel_ptr: Any,
    entries_ptr: Any,
    num_vectors: Any,
    keys: Any,
    rows: Any,
    m_i: Any,
) -> Any:
    kv_pos, step, kv_lane = keys
    slope, bias_pos, begin, end = rows
    for i in range(num_vectors):
        pos = kv_lane + splat_i32(kv_pos + i * step)
        score = load_f32(panel_ptr + i * VECTOR_BYTES)
        if bias != c.NO_BIAS:  # without a bias the scale is the score's unit (see softmax)
            score = score * qk_scale
        if bias == c.LINEAR:
            score = score + linear_bias(slope, bias_pos, pos)
        elif bias == c.SQRT:
            score = score + sqrt_bias(slope, bias_pos, pos)
        elif bias == c.LEFT_ALIGN:
            score = score + left_align_bias(slope, bias_pos, pos)
        elif bias == c.TEMPLATE_LINEAR:
            score = score + template_linear_bias(slope, load_f32(entries_ptr + i * VECTOR_BYTES), bias_pos, pos)
        elif bias == c.TEMPLATE_SQRT:
            score = score + template_sqrt_bias(slope, load_f32(entries_ptr + i * VECTOR_BYTES), bias_pos, pos)
        elif bias == c.TEMPLATE_LEFT_ALIGN:
            score = score + template_left_align_bias(slope, load_f32(entries_ptr + i * VECTOR_BYTES), bias_pos, pos)
        elif bias == c.HEADS_MASK:
            score = score + load_f32(entries_ptr + i * VECTOR_BYTES)
        if is_edge:
            score = where(is_visible(pos, begin, end), score, NEG_INF)
        if is_edge or bias != c.NO_BIAS:
            store_f32(panel_ptr + i * VECTOR_BYTES, score)
        m_i = running_max(m_i, score)
    return m_i


@device_function
def score_panel(
    params: Any, is_edge: Any, panel_ptr: Any, entries_ptr: Any, num_vectors: Any, keys: Any, rows: Any, m_i: Any
) -> Any:
    """Turns products into scores in place and returns the new running max. Each kind of bias has a
    loop of its own.

    keys  (kv_pos, step, kv_lane): vector i, lane x scores the key kv_pos + i * step + kv_lane[x]
    rows  lanes of rows_of_panel
    """
    a = params.qk_scale, panel_ptr, entries_ptr, num_vectors, keys, rows, m_i
    bias = params.bias
    if bias == c.NO_BIAS:
        return score_panel_of(c.NO_BIAS, True, *a) if is_edge else score_panel_of(c.NO_BIAS, False, *a)
    if bias == c.LINEAR:
        return score_panel_of(c.LINEAR, True, *a) if is_edge else score_panel_of(c.LINEAR, False, *a)
    if bias == c.SQRT:
        return score_panel_of(c.SQRT, True, *a) if is_edge else score_panel_of(c.SQRT, False, *a)
    if bias == c.LEFT_ALIGN:
        return score_panel_of(c.LEFT_ALIGN, True, *a) if is_edge else score_panel_of(c.LEFT_ALIGN, False, *a)
    if bias == c.TEMPLATE_LINEAR:
        return score_panel_of(c.TEMPLATE_LINEAR, True, *a)
    if bias == c.TEMPLATE_SQRT:
        return score_panel_of(c.TEMPLATE_SQRT, True, *a)
    if bias == c.TEMPLATE_LEFT_ALIGN:
        return score_panel_of(c.TEMPLATE_LEFT_ALIGN, True, *a)
    return score_panel_of(c.HEADS_MASK, True, *a)


@device_function
def exp_panel(panel_ptr: Any, num_vectors: Any, shift: Any, unit_log2: Any) -> Any:
    """Turns scores into probabilities (not yet normalised) in place and returns their sum."""
    total = splat_f32(ZERO)
    whole = num_vectors // 4 * 4
    for i in range(0, whole, 4):  # four chains at a time: 33 cycles a vector instead of 40 (Zen 1)
        at_ptr = panel_ptr + i * VECTOR_BYTES
        p0 = exp_score(load_f32(at_ptr), shift, unit_log2)
        p1 = exp_score(load_f32(at_ptr + VECTOR_BYTES), shift, unit_log2)
        p2 = exp_score(load_f32(at_ptr + 2 * VECTOR_BYTES), shift, unit_log2)
        p3 = exp_score(load_f32(at_ptr + 3 * VECTOR_BYTES), shift, unit_log2)
        store_f32(at_ptr, p0)
        store_f32(at_ptr + VECTOR_BYTES, p1)
        store_f32(at_ptr + 2 * VECTOR_BYTES, p2)
        store_f32(at_ptr + 3 * VECTOR_BYTES, p3)
        total = total + p0 + p1 + p2 + p3
    for i in range(whole, num_vectors):
        p = exp_score(load_f32(panel_ptr + i * VECTOR_BYTES), shift, unit_log2)
        store_f32(panel_ptr + i * VECTOR_BYTES, p)
        total = total + p
    return total
