"""The rule chain on one column of scores: scale -> bias -> visibility -> running softmax. One lane is one query row.

A column holds `num_vectors` vectors; vector i, lane x scores key kv_pos + i * keys_per_vector + kv_lane[x].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline, part
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.paged_kv import item_bytes, load_lanes
from numba_prefix.cpu.kernel.sizes import VECTOR_BYTES
from numba_prefix.cpu.simd.memory import (
    gather_bf16,
    gather_f16,
    gather_f32,
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
from numba_prefix.rules.softmax import running_max, weight

ZERO = np.float32(0.0)
NEG_INF = np.float32(-np.inf)


@inline
def mask_rows(params: Any, base: Any, q_pos: Any, pos: Any) -> Any:
    """Where the rows lie that hold the entries of these queries and keys, int64 lanes."""
    row = heads_mask_row(q_pos, pos) if params.bias == c.HEADS_MASK else template_row(q_pos, pos)
    return base + to_i64(row) * params.mask_row_stride


@inline
def gather_entries_of(
    dtype: Any,
    params: Any,
    base: Any,
    q_pos: Any,
    kv_pos: Any,
    kv_lane: Any,
    step: Any,
    num_vectors: Any,
    entries: Any,
    spare: Any,
) -> None:
    item = item_bytes(dtype)
    has_runs = step == 1 and params.mask_column_stride == item
    i = 0
    while i < num_vectors:
        pos = kv_lane + splat_i32(kv_pos + i * step)
        rows = mask_rows(params, base, q_pos, pos)
        first = (kv_pos + i) & 127
        if has_runs and i + 16 <= num_vectors and first + 16 <= 128:
            # Of 16 keys side by side, a row's entries are, too: 16 loads and a transposition instead of 256 loads.
            store_i64(spare + 16 * VECTOR_BYTES, rows)
            for lane in range(16):
                source = load1_i64(spare + 16 * VECTOR_BYTES + 8 * lane) + first * item
                store_f32(spare + lane * VECTOR_BYTES, load_lanes(dtype, source))
            transpose_block(spare, VECTOR_BYTES, entries + i * VECTOR_BYTES, VECTOR_BYTES)
            i += 16
            continue
        addresses = rows + to_i64(pos & 127) * params.mask_column_stride
        if dtype == c.FLOAT16:
            entry = gather_f16(addresses)
        elif dtype == c.BFLOAT16:
            entry = gather_bf16(addresses)
        else:
            entry = gather_f32(addresses)
        store_f32(entries + i * VECTOR_BYTES, entry)
        i += 1


@part
def gather_entries(
    params: Any,
    base: Any,
    q_pos: Any,
    kv_pos: Any,
    kv_lane: Any,
    step: Any,
    num_vectors: Any,
    entries: Any,
    spare: Any,
) -> None:
    """A given mask's entries for a column, as float32 [num_vectors, 16] at `entries`. spare: 18 vectors, where step is 1."""
    a = params, base, q_pos, kv_pos, kv_lane, step, num_vectors, entries, spare
    dtype = params.mask_dtype
    if dtype == c.FLOAT16:
        gather_entries_of(c.FLOAT16, *a)
    elif dtype == c.BFLOAT16:
        gather_entries_of(c.BFLOAT16, *a)
    else:
        gather_entries_of(c.FLOAT32, *a)


@inline
def score_column_of(
    bias: Any,
    is_edge: Any,
    column: Any,
    entries: Any,
    num_vectors: Any,
    kv_pos: Any,
    step: Any,
    kv_lane: Any,
    qk_scale: Any,
    slope: Any,
    origin: Any,
    begin: Any,
    end: Any,
    m_i: Any,
) -> Any:
    for i in range(num_vectors):
        pos = kv_lane + splat_i32(kv_pos + i * step)
        score = load_f32(column + i * VECTOR_BYTES)
        if bias != c.NO_BIAS:  # without a bias the scale is the score's unit (see softmax)
            score = score * qk_scale
        if bias == c.LINEAR:
            score = score + linear_bias(slope, origin, pos)
        elif bias == c.SQRT:
            score = score + sqrt_bias(slope, origin, pos)
        elif bias == c.LEFT_ALIGN:
            score = score + left_align_bias(slope, origin, pos)
        elif bias == c.TEMPLATE_LINEAR:
            score = score + template_linear_bias(slope, load_f32(entries + i * VECTOR_BYTES), origin, pos)
        elif bias == c.TEMPLATE_SQRT:
            score = score + template_sqrt_bias(slope, load_f32(entries + i * VECTOR_BYTES), origin, pos)
        elif bias == c.TEMPLATE_LEFT_ALIGN:
            score = score + template_left_align_bias(slope, load_f32(entries + i * VECTOR_BYTES), origin, pos)
        elif bias == c.HEADS_MASK:
            score = score + load_f32(entries + i * VECTOR_BYTES)
        if is_edge:
            score = where(is_visible(pos, begin, end), score, NEG_INF)
        if is_edge or bias != c.NO_BIAS:
            store_f32(column + i * VECTOR_BYTES, score)
        m_i = running_max(m_i, score)
    return m_i


@part
def score_column(
    params: Any,
    is_edge: Any,
    column: Any,
    entries: Any,
    num_vectors: Any,
    kv_pos: Any,
    step: Any,
    kv_lane: Any,
    qk_scale: Any,
    slope: Any,
    origin: Any,
    begin: Any,
    end: Any,
    m_i: Any,
) -> Any:
    """Turns products into scores in place and returns the new running max. A loop of its own for each kind of bias.

    origin: int32 lanes, the position that biases are relative to: the query's, or the row's last held key for left-aligned
    ones whose lse has their shift.
    """
    a = (column, entries, num_vectors, kv_pos, step, kv_lane, qk_scale, slope, origin, begin, end, m_i)
    bias = params.bias
    if bias == c.NO_BIAS:
        return score_column_of(c.NO_BIAS, True, *a) if is_edge else score_column_of(c.NO_BIAS, False, *a)
    if bias == c.LINEAR:
        return score_column_of(c.LINEAR, True, *a) if is_edge else score_column_of(c.LINEAR, False, *a)
    if bias == c.SQRT:
        return score_column_of(c.SQRT, True, *a) if is_edge else score_column_of(c.SQRT, False, *a)
    if bias == c.LEFT_ALIGN:
        return score_column_of(c.LEFT_ALIGN, True, *a) if is_edge else score_column_of(c.LEFT_ALIGN, False, *a)
    if bias == c.TEMPLATE_LINEAR:
        return score_column_of(c.TEMPLATE_LINEAR, True, *a)
    if bias == c.TEMPLATE_SQRT:
        return score_column_of(c.TEMPLATE_SQRT, True, *a)
    if bias == c.TEMPLATE_LEFT_ALIGN:
        return score_column_of(c.TEMPLATE_LEFT_ALIGN, True, *a)
    return score_column_of(c.HEADS_MASK, True, *a)


@part
def weigh_column(column: Any, num_vectors: Any, shift: Any, unit_log2: Any) -> Any:
    """Turns scores into weights in place and returns their sum."""
    total = splat_f32(ZERO)
    whole = num_vectors // 4 * 4
    for i in range(0, whole, 4):  # four chains at a time: 33 cycles a vector instead of 40 (Zen 1)
        at = column + i * VECTOR_BYTES
        p0 = weight(load_f32(at), shift, unit_log2)
        p1 = weight(load_f32(at + VECTOR_BYTES), shift, unit_log2)
        p2 = weight(load_f32(at + 2 * VECTOR_BYTES), shift, unit_log2)
        p3 = weight(load_f32(at + 3 * VECTOR_BYTES), shift, unit_log2)
        store_f32(at, p0)
        store_f32(at + VECTOR_BYTES, p1)
        store_f32(at + 2 * VECTOR_BYTES, p2)
        store_f32(at + 3 * VECTOR_BYTES, p3)
        total = total + p0 + p1 + p2 + p3
    for i in range(whole, num_vectors):
        p = weight(load_f32(column + i * VECTOR_BYTES), shift, unit_log2)
        store_f32(column + i * VECTOR_BYTES, p)
        total = total + p
    return total
