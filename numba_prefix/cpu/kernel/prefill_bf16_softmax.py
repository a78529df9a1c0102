"""The paths for pairs of bfloat16: from the products of a strip and a block of keys to weights, UNIT_N keys at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline, part
from numba_prefix.cpu.kernel.prefill_f32 import apply_rules
from numba_prefix.cpu.kernel.sizes import PANEL_P_BYTES, PANEL_S_BYTES, STEP_N, STRIP, VECTOR_BYTES
from numba_prefix.cpu.simd.bf16_pairs import from_bits, high_bits, join_pairs, rounded_pairs, store_i32
from numba_prefix.cpu.simd.memory import any_lane, load1_f32, load1_i64, load_f32, splat_f32, store_f32
from numba_prefix.rules.softmax import rescale, shift_of, weight
from numba_prefix.rules.tiling import round_up

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
NEG_INF = np.float32(-np.inf)
UNIT_N = 8  # keys whose weights are computed between products of tiles
UNITS = STEP_N // UNIT_N

# WEIGHING: first what a step has to weigh and how far that is, int64 (UNIT_LOG2 float32); then for each column of a strip what
# its scores are lowered by and the sum of its weights so far; then, in two buffers, what a strip's accumulators are scaled by, a
# turn after its weights are computed.
CREDIT, GROUPS, UNIT, NUM_UNITS, S_AT, P_AT, TO_LOW, UNIT_LOG2 = range(0, 64, 8)


@inline
def weighing_of(place: Any, weighing: Any) -> Any:
    return weighing + (1 + 2 * place) * VECTOR_BYTES


@inline
def alphas_of(turn: Any, weighing: Any) -> Any:
    return weighing + (1 + 2 * STRIP + (turn & 1) * STRIP) * VECTOR_BYTES


@part
def begin_weights(
    params: Any,
    column: Any,
    place: Any,
    s: Any,
    alphas: Any,
    is_edge: Any,
    kv_pos: Any,
    num_keys: Any,
    weighing: Any,
    scratch: Any,
) -> Any:
    """One column's products to scores, and its state so far to the new maximum; whether that changes any row's. place: the
    column's in its strip."""
    state = scratch + params.state_offset + 2 * column * VECTOR_BYTES
    m_old = load_f32(state)
    m_i = apply_rules(params, column, s, is_edge, kv_pos, num_keys, m_old, scratch)
    shift = shift_of(m_i)
    alpha = rescale(m_old, shift, params.unit_log2)
    store_f32(state, m_i)
    store_f32(state + VECTOR_BYTES, load_f32(state + VECTOR_BYTES) * alpha)
    store_f32(alphas + place * VECTOR_BYTES, alpha)
    store_f32(weighing_of(place, weighing), shift)
    store_f32(weighing_of(place, weighing) + VECTOR_BYTES, splat_f32(ZERO))
    for j in range(num_keys, round_up(num_keys, STEP_N)):
        store_f32(s + j * VECTOR_BYTES, splat_f32(NEG_INF))
    return any_lane(alpha != ONE)


@part
def end_weights(params: Any, column: Any, place: Any, weighing: Any, scratch: Any) -> None:
    """What a column's weights came to, into its state."""
    l_i = scratch + params.state_offset + (2 * column + 1) * VECTOR_BYTES
    store_f32(l_i, load_f32(l_i) + load_f32(weighing_of(place, weighing) + VECTOR_BYTES))


@inline
def weigh_unit_of(parts: Any, s: Any, p: Any, to_low: Any, shift: Any, unit_log2: Any) -> Any:
    total = splat_f32(ZERO)
    for i in range(0, UNIT_N, 4):  # four at a time, as scores.weigh_column
        at, to = s + i * VECTOR_BYTES, p + (i >> 1) * VECTOR_BYTES
        p0 = weight(load_f32(at), shift, unit_log2)
        p1 = weight(load_f32(at + VECTOR_BYTES), shift, unit_log2)
        p2 = weight(load_f32(at + 2 * VECTOR_BYTES), shift, unit_log2)
        p3 = weight(load_f32(at + 3 * VECTOR_BYTES), shift, unit_log2)
        if parts == 2:
            h0, h1, h2, h3 = high_bits(p0), high_bits(p1), high_bits(p2), high_bits(p3)
            store_i32(to, join_pairs(h0, h1))
            store_i32(to + VECTOR_BYTES, join_pairs(h2, h3))
            store_i32(to + to_low, rounded_pairs(p0 - from_bits(h0), p1 - from_bits(h1)))
            store_i32(to + to_low + VECTOR_BYTES, rounded_pairs(p2 - from_bits(h2), p3 - from_bits(h3)))
        else:
            store_i32(to, rounded_pairs(p0, p1))
            store_i32(to + VECTOR_BYTES, rounded_pairs(p2, p3))
        total = total + p0 + p1 + p2 + p3
    return total


@part
def weigh_unit(weighing: Any, unit: Any) -> None:
    """UNIT_N scores of one column to weights, added to its sum. Of STEP_N keys there are UNITS units to a column."""
    place, key = unit // UNITS, unit % UNITS * UNIT_N
    state = weighing_of(place, weighing)
    shift, unit_log2, to_low = load_f32(state), load1_f32(weighing + UNIT_LOG2), load1_i64(weighing + TO_LOW)
    s = load1_i64(weighing + S_AT) + place * PANEL_S_BYTES + key * VECTOR_BYTES
    p = load1_i64(weighing + P_AT) + place * PANEL_P_BYTES + (key >> 1) * VECTOR_BYTES
    a = s, p, to_low, shift, unit_log2
    total = weigh_unit_of(2, *a) if to_low > 0 else weigh_unit_of(1, *a)
    store_f32(state + VECTOR_BYTES, load_f32(state + VECTOR_BYTES) + total)
