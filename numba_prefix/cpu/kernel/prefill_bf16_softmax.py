"""Softmax of the bfloat16 paths: from the products of a strip and a key tile to probabilities,
CHUNK_N keys at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import device_function, inline
from numba_prefix.cpu.kernel.prefill_f32 import apply_rules
from numba_prefix.cpu.kernel.sizes import PANEL_P_BYTES, PANEL_S_BYTES, STEP_N, STRIP, VECTOR_BYTES
from numba_prefix.cpu.simd.bf16_pairs import from_bits, high_bits, join_pairs, rounded_pairs, store_i32
from numba_prefix.cpu.simd.memory import any_lane, load1_f32, load1_i64, load_f32, splat_f32, store_f32
from numba_prefix.rules.softmax import exp_score, rescale, shift_of
from numba_prefix.rules.tiling import round_up

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
NEG_INF = np.float32(-np.inf)
CHUNK_N = 8  # keys whose exponentials are computed between products of tiles
CHUNKS = STEP_N // CHUNK_N

# The record at softmax_offset, in vectors of 64 bytes:
#
#     0                      fields of a pipeline step, named below by their byte offsets: int64,
#                            but for UNIT_LOG2 (float32)
#     1 + 2 * x              shift that the scores of panel x of the strip are lowered by
#     2 + 2 * x              sum of its probabilities so far
#     1 + 2 * STRIP + x      alpha of panel x, which its accumulators are scaled by a turn later
#     1 + 3 * STRIP + x      alpha of panel x in turns of odd number
#
# CREDIT, GROUPS and NEXT_CHUNK share chunks out among groups of products (amx.exp_some); S_AT and
# P_AT are addresses, TO_LOW the bytes from a plane of probabilities to the next, 0 for one plane.
CREDIT, GROUPS, NEXT_CHUNK, NUM_CHUNKS, S_AT, P_AT, TO_LOW, UNIT_LOG2 = range(0, 64, 8)


@inline
def softmax_of_panel(place: Any, softmax_ptr: Any) -> Any:
    return softmax_ptr + (1 + 2 * place) * VECTOR_BYTES


@inline
def alphas_of(turn: Any, softmax_ptr: Any) -> Any:
    return softmax_ptr + (1 + 2 * STRIP + (turn & 1) * STRIP) * VECTOR_BYTES


@device_function
def begin_softmax(
    params: Any,
    panel: Any,
    place: Any,
    s_ptr: Any,
    alphas_ptr: Any,
    is_edge: Any,
    kv_pos: Any,
    num_keys: Any,
    softmax_ptr: Any,
    scratch_ptr: Any,
) -> Any:
    """Turns the products of one panel into scores and brings its state to the new maximum; returns
    whether that changes any row. place: of the panel in its strip."""
    state_ptr = scratch_ptr + params.state_offset + 2 * panel * VECTOR_BYTES
    m_old = load_f32(state_ptr)
    m_i = apply_rules(params, panel, s_ptr, is_edge, kv_pos, num_keys, m_old, scratch_ptr)
    shift = shift_of(m_i)
    alpha = rescale(m_old, shift, params.unit_log2)
    store_f32(state_ptr, m_i)
    store_f32(state_ptr + VECTOR_BYTES, load_f32(state_ptr + VECTOR_BYTES) * alpha)
    store_f32(alphas_ptr + place * VECTOR_BYTES, alpha)
    store_f32(softmax_of_panel(place, softmax_ptr), shift)
    store_f32(softmax_of_panel(place, softmax_ptr) + VECTOR_BYTES, splat_f32(ZERO))
    for j in range(num_keys, round_up(num_keys, STEP_N)):
        store_f32(s_ptr + j * VECTOR_BYTES, splat_f32(NEG_INF))
    return any_lane(alpha != ONE)


@device_function
def end_softmax(params: Any, panel: Any, place: Any, softmax_ptr: Any, scratch_ptr: Any) -> None:
    """Adds the sum of a panel's probabilities to its state."""
    l_i_ptr = scratch_ptr + params.state_offset + (2 * panel + 1) * VECTOR_BYTES
    store_f32(l_i_ptr, load_f32(l_i_ptr) + load_f32(softmax_of_panel(place, softmax_ptr) + VECTOR_BYTES))


@inline
def exp_chunk_of(planes: Any, s_ptr: Any, p_ptr: Any, to_low: Any, shift: Any, unit_log2: Any) -> Any:
    total = splat_f32(ZERO)
    for i in range(0, CHUNK_N, 4):  # four at once, as in scores.exp_panel
        at_ptr, to_ptr = s_ptr + i * VECTOR_BYTES, p_ptr + (i >> 1) * VECTOR_BYTES
        p0 = exp_score(load_f32(at_ptr), shift, unit_log2)
        p1 = exp_score(load_f32(at_ptr + VECTOR_BYTES), shift, unit_log2)
        p2 = exp_score(load_f32(at_ptr + 2 * VECTOR_BYTES), shift, unit_log2)
        p3 = exp_score(load_f32(at_ptr + 3 * VECTOR_BYTES), shift, unit_log2)
        if planes == 2:
            h0, h1, h2, h3 = high_bits(p0), high_bits(p1), high_bits(p2), high_bits(p3)
            store_i32(to_ptr, join_pairs(h0, h1))
            store_i32(to_ptr + VECTOR_BYTES, join_pairs(h2, h3))
            store_i32(to_ptr + to_low, rounded_pairs(p0 - from_bits(h0), p1 - from_bits(h1)))
            store_i32(to_ptr + to_low + VECTOR_BYTES, rounded_pairs(p2 - from_bits(h2), p3 - from_bits(h3)))
        else:
            store_i32(to_ptr, rounded_pairs(p0, p1))
            store_i32(to_ptr + VECTOR_BYTES, rounded_pairs(p2, p3))
        total = total + p0 + p1 + p2 + p3
    return total


@device_function
def exp_chunk(softmax_ptr: Any, chunk: Any) -> None:
    """Turns CHUNK_N scores of one panel into probabilities, added to its sum. STEP_N keys of a
    panel make CHUNKS chunks."""
    place, key = chunk // CHUNKS, chunk % CHUNKS * CHUNK_N
    state_ptr = softmax_of_panel(place, softmax_ptr)
    shift, unit_log2, to_low = load_f32(state_ptr), load1_f32(softmax_ptr + UNIT_LOG2), load1_i64(softmax_ptr + TO_LOW)
    s_ptr = load1_i64(softmax_ptr + S_AT) + place * PANEL_S_BYTES + key * VECTOR_BYTES
    p_ptr = load1_i64(softmax_ptr + P_AT) + place * PANEL_P_BYTES + (key >> 1) * VECTOR_BYTES
    a = s_ptr, p_ptr, to_low, shift, unit_log2
    total = exp_chunk_of(2, *a) if to_low > 0 else exp_chunk_of(1, *a)
    store_f32(state_ptr + VECTOR_BYTES, load_f32(state_ptr + VECTOR_BYTES) + total)
