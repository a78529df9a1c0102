"""Prefill on the bfloat16 paths, which multiply pairs of bfloat16: on AMX tiles, or by vdpbf16ps on
vectors.

    S^T[key, row] += K[key, pair] . Q^T[pair, row]    a pair: two dimensions
    O^T[dim, row] += V^T[dim, pair] . P^T[pair, row]  a pair: two keys

Probabilities of bfloat16 inputs are rounded to bfloat16. A float16 input or probability is the sum
of two bfloat16, a high and a low plane; of the four products of values and probabilities that of
the low planes is left out: 2**-16 of the whole, where float16 rounds by 2**-11.

These instructions take numbers below 2**-126 (1.2e-38) as 0, in and out, as those of other paths do
not.

Up to PACK_N keys and values are packed at once. A software pipeline of three stages then takes each
strip of two panels through them, BLOCK_N keys a turn: S = K . Q of one turn, softmax of the turn
before, O += V . P of the one before that, in steps of 32 keys, so that vector code runs beside the
tile unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import device_function, inline
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.paged_kv import item_bytes, list_rows, load_one, load_query, prefetch_rows
from numba_prefix.cpu.kernel.prefill_bf16_pack import clear_row, list_zeros, pack_query, pack_rows
from numba_prefix.cpu.kernel.prefill_bf16_softmax import (
    CHUNKS,
    NUM_CHUNKS,
    P_AT,
    S_AT,
    TO_LOW,
    UNIT_LOG2,
    alphas_of,
    begin_softmax,
    end_softmax,
)
from numba_prefix.cpu.kernel.row_state import range_of_lanes, rows_of_panel, set_lane
from numba_prefix.cpu.kernel.sizes import (
    BFLOAT,
    BLOCK_N,
    PACK_N,
    PAIR_DIMS,
    PANEL_P_BYTES,
    PANEL_S_BYTES,
    STEP_N,
    STEPS,
    STRIP,
    VECTOR_BYTES,
)
from numba_prefix.cpu.simd.bf16_pairs import first_of_pairs, second_of_pairs
from numba_prefix.cpu.simd.memory import (
    any_lane,
    is_not_finite,
    load1_i64,
    load_f32,
    load_i32,
    splat_f32,
    splat_i32,
    store1_f32,
    store1_i64,
    store_f32,
    transpose_block,
)
from numba_prefix.rules import tiling
from numba_prefix.rules.elementwise import multiply_add, where
from numba_prefix.rules.masks import is_visible
from numba_prefix.rules.tiling import ceil_div, lane_rows, round_up

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
NEG_INF = np.float32(-np.inf)


@inline
def plane_bytes(params: Any) -> Any:
    """Bytes of one plane of a packed row of keys, or of values before they are transposed."""
    return round_up(params.head_size, PAIR_DIMS) * BFLOAT


@inline
def panel_q_bytes(params: Any) -> Any:
    """Bytes of one panel of queries."""
    return params.planes * (plane_bytes(params) // 4) * VECTOR_BYTES


@inline
def panel_acc_bytes(params: Any) -> Any:
    return round_up(params.head_size, 16) * VECTOR_BYTES


@inline
def s_of_turn(params: Any, turn: Any, scratch_ptr: Any) -> Any:
    """One of the two buffers of scores, in turns."""
    return scratch_ptr + params.s_offset + (turn & 1) * (STRIP * PANEL_S_BYTES)


@inline
def p_of_turn(params: Any, turn: Any, scratch_ptr: Any) -> Any:
    """One of the two buffers of probabilities, in turns."""
    return scratch_ptr + params.p_offset + (turn & 1) * (params.planes * params.p_plane_bytes)


@device_function
def load_queries(
    params: Any, sequence: Any, runs: Any, first_row: Any, rows: Any, kv_head: Any, scratch_ptr: Any
) -> None:
    """Lays out query rows as panels of pairs [plane][pair of dimensions, 16], and what the rules
    need of each row. Lanes past the last row repeat it, so that they never widen a key range."""
    row_ptr, packed_ptr = scratch_ptr + params.staging_offset, scratch_ptr + params.k_rows_offset
    pitch, row_pairs = params.k_pitch, params.planes * (round_up(params.head_size, PAIR_DIMS) // 2)
    is_non_finite = False
    for lane in range(lane_rows(rows)):
        source_ptr = set_lane(params, sequence, runs, first_row + min(lane, rows - 1), kv_head, lane, scratch_ptr)
        load_query(params, source_ptr, row_ptr)
        if pack_query(params, row_ptr, packed_ptr + (lane & 15) * pitch):
            is_non_finite = True
        if lane & 15 == 15:
            panel_ptr = scratch_ptr + params.q_t_offset + (lane >> 4) * panel_q_bytes(params)
            for i in range(0, row_pairs, 16):
                transpose_block(packed_ptr + 4 * i, pitch, panel_ptr + i * VECTOR_BYTES, VECTOR_BYTES)
    store1_i64(scratch_ptr + params.non_finite_offset, 1 if is_non_finite and params.planes == 2 else 0)
    clear_row(params, scratch_ptr)


@device_function
def scores_non_finite(params: Any, list_ptr: Any, panel: Any, s_ptr: Any, num_keys: Any, scratch_ptr: Any) -> None:
    """Mends the products of one panel of float16 rows with listed keys where one of them is not
    finite: a low plane of 0 may have met an infinity. Others keep their bits."""
    q_t_ptr = scratch_ptr + params.q_t_offset + panel * panel_q_bytes(params)
    q_low = (round_up(params.head_size, PAIR_DIMS) // 2) * VECTOR_BYTES
    for j in range(num_keys):
        product = load_f32(s_ptr + j * VECTOR_BYTES)
        if any_lane(is_not_finite(product)):
            source_ptr, total = load1_i64(list_ptr + 8 * j), splat_f32(ZERO)
            for d in range(params.head_size):
                high = load_i32(q_t_ptr + (d >> 1) * VECTOR_BYTES)
                low = load_i32(q_t_ptr + (d >> 1) * VECTOR_BYTES + q_low)
                first, second = first_of_pairs(high) + first_of_pairs(low), second_of_pairs(high) + second_of_pairs(low)
                q = second if d & 1 else first
                total = multiply_add(q, splat_f32(load_one(c.FLOAT16, source_ptr + BFLOAT * d)), total)
            store_f32(s_ptr + j * VECTOR_BYTES, where(is_not_finite(product), total, product))


@inline
def add_non_finite_of(
    dtype: Any, params: Any, list_ptr: Any, panel: Any, p_ptr: Any, kv_pos: Any, num_keys: Any, scratch_ptr: Any
) -> None:
    _, _, begin, end = rows_of_panel(params, panel, scratch_ptr)
    acc_ptr = scratch_ptr + params.acc_offset + panel * panel_acc_bytes(params)
    for j in range(num_keys):
        source_ptr, pairs = load1_i64(list_ptr + 8 * j), load_i32(p_ptr + (j >> 1) * VECTOR_BYTES)
        p = second_of_pairs(pairs) if j & 1 else first_of_pairs(pairs)
        seen = is_visible(splat_i32(kv_pos + j), begin, end)
        for d in range(params.head_size):
            value = load_one(dtype, source_ptr + BFLOAT * d)
            if value - value != ZERO:
                at_ptr = acc_ptr + d * VECTOR_BYTES
                store_f32(at_ptr, where(seen, load_f32(at_ptr) + p * splat_f32(value), load_f32(at_ptr)))


@device_function
def add_non_finite(
    params: Any, list_ptr: Any, panel: Any, p_ptr: Any, kv_pos: Any, num_keys: Any, scratch_ptr: Any
) -> None:
    """Adds values that are not finite, which the product had as 0, to the rows of a panel that see
    them: the probability 0 of a hidden key must not meet them."""
    if params.planes == 2:
        add_non_finite_of(c.FLOAT16, params, list_ptr, panel, p_ptr, kv_pos, num_keys, scratch_ptr)
    else:
        add_non_finite_of(c.BFLOAT16, params, list_ptr, panel, p_ptr, kv_pos, num_keys, scratch_ptr)


@inline
def keys_of_strip(params: Any, panel: Any, num_panels: Any, kv_pos: Any, num_keys: Any, scratch_ptr: Any) -> Any:
    """Keys from kv_pos on that some row of a strip sees: the first, as a whole number
    of BLOCK_N, and one past the last. None past the last strip."""
    first, stop = 0, 0
    if panel < num_panels:
        begin, _, _, end = range_of_lanes(params, 16 * panel, 16 * min(panel + STRIP, num_panels) - 1, scratch_ptr)
        first, stop = tiling.keys_between(begin, end, kv_pos, num_keys)
    return first // BLOCK_N * BLOCK_N, stop


@inline
def dims_of_step(params: Any, i: Any) -> Any:
    """The first and one past the last of the dimensions that step i of STEPS adds to."""
    dims = ceil_div(params.head_size, PAIR_DIMS)
    return dims * i // STEPS * PAIR_DIMS, min(dims * (i + 1) // STEPS * PAIR_DIMS, round_up(params.head_size, 16))


def make_attend(pack_values: Any, scale_acc: Any, step: Any) -> Any:
    """Makes a path's attend_keys of its micro-kernels.

    pack_values  packs the values of a list of rows, whose number is a multiple of STEP_N
    scale_acc    (params, acc_ptr, alpha_ptr): multiplies a panel's accumulators by alpha, unless
                 step does
    step         (params, scoring, softmax_ptr, adding, scratch_ptr): a pipeline step, which is a
                 share of each of three stages; any of them may have nothing to do

        scoring      (keys_ptr, q_t_ptr, width, s_ptr): S = K . Q of STEP_N keys and `width`
                     panels; none if width is 0
        softmax_ptr  the record of prefill_bf16_softmax.py: NUM_CHUNKS chunks of exponentials
        adding       (key, p_ptr, num_keys, first, end, width, acc_ptr, alphas_ptr): O += V . P for
                     dimensions `first` to `end` of `width` panels and the values from `key` on;
                     none if first is end
    """

    @device_function
    def attend_pack(
        params: Any, num_panels: Any, kv_pos: Any, num_keys: Any, lists: Any, num_next: Any, scratch_ptr: Any
    ) -> None:
        """Attends all strips to up to PACK_N keys, BLOCK_N at a time; meanwhile the next rows come
        into the cache.

        lists: addresses of the lists of key rows and value rows, and of num_next of each that come
        next.
        """
        k_list_ptr, v_list_ptr, next_k_list_ptr, next_v_list_ptr = lists
        k_rows_ptr, staging_ptr = scratch_ptr + params.k_rows_offset, scratch_ptr + params.staging_offset
        non_finite_scores = pack_rows(params, False, k_list_ptr, num_keys, k_rows_ptr, staging_ptr)
        non_finite_scores = non_finite_scores or load1_i64(scratch_ptr + params.non_finite_offset) != 0
        list_zeros(v_list_ptr, num_keys, round_up(num_keys, STEP_N), scratch_ptr + params.zero_row_offset)
        non_finite_values = pack_values(params, False, v_list_ptr, num_keys, scratch_ptr)
        if non_finite_values:
            pack_values(params, True, v_list_ptr, num_keys, scratch_ptr)
        row_bytes = params.head_size * item_bytes(params.kv_dtype)
        turns = ceil_div(num_panels, STRIP) * ceil_div(num_keys, BLOCK_N) + 2
        # The first panel of a strip, and a key: a turn scores what the next one exponentiates and
        # the one after that adds.
        score_at = exp_at = add_at = 0
        exp_key = add_key = 0
        score_key, stop = keys_of_strip(params, 0, num_panels, kv_pos, num_keys, scratch_ptr)
        to_exp = to_add = 0
        is_grown = False
        softmax_ptr = scratch_ptr + params.softmax_offset
        store1_f32(softmax_ptr + UNIT_LOG2, params.unit_log2)
        store1_i64(softmax_ptr + TO_LOW, params.p_plane_bytes if params.planes == 2 else 0)
        for turn in range(turns):
            while score_at < num_panels and score_key >= stop:
                score_at += STRIP
                score_key, stop = keys_of_strip(params, score_at, num_panels, kv_pos, num_keys, scratch_ptr)
            to_score = min(BLOCK_N, stop - score_key)
            if score_at >= num_panels:
                to_score = 0
            if to_score + to_exp + to_add == 0:
                break
            asked = num_next * turn // turns
            count = num_next * (turn + 1) // turns - asked
            prefetch_rows(next_k_list_ptr + 8 * asked, count, row_bytes)
            prefetch_rows(next_v_list_ptr + 8 * asked, count, row_bytes)
            s_new_ptr, s_old_ptr = s_of_turn(params, turn, scratch_ptr), s_of_turn(params, turn + 1, scratch_ptr)
            p_new_ptr, p_old_ptr = p_of_turn(params, turn, scratch_ptr), p_of_turn(params, turn + 1, scratch_ptr)
            score_width, exp_width = min(STRIP, num_panels - score_at), min(STRIP, num_panels - exp_at)
            add_width = min(STRIP, num_panels - add_at)
            acc_ptr = scratch_ptr + params.acc_offset + add_at * panel_acc_bytes(params)
            alphas_ptr = alphas_of(turn + 1, softmax_ptr)
            if to_add > 0 and is_grown:
                for x in range(add_width):
                    scale_acc(params, acc_ptr + x * panel_acc_bytes(params), alphas_ptr + x * VECTOR_BYTES)
            is_grown = False
            if to_exp > 0:
                last_lane = 16 * (exp_at + exp_width) - 1
                _, full_begin, full_end, _ = range_of_lanes(params, 16 * exp_at, last_lane, scratch_ptr)
                is_edge = tiling.is_edge(full_begin, full_end, kv_pos + exp_key, to_exp)
                for x in range(exp_width):
                    s_ptr, panel, pos = s_old_ptr + x * PANEL_S_BYTES, exp_at + x, kv_pos + exp_key
                    if non_finite_scores:
                        scores_non_finite(params, k_list_ptr + 8 * exp_key, panel, s_ptr, to_exp, scratch_ptr)
                    place = panel, x, s_ptr, alphas_of(turn, softmax_ptr)
                    if begin_softmax(params, *place, is_edge, pos, to_exp, softmax_ptr, scratch_ptr):
                        is_grown = True
            key_rows_ptr = k_rows_ptr + score_key * params.k_pitch
            q_t_ptr = scratch_ptr + params.q_t_offset + score_at * panel_q_bytes(params)
            for i in range(STEPS):
                j = i * STEP_N
                width = score_width if j < to_score else 0
                scoring = (key_rows_ptr + j * params.k_pitch, q_t_ptr, width, s_new_ptr + j * VECTOR_BYTES)
                store1_i64(softmax_ptr + NUM_CHUNKS, exp_width * CHUNKS if j < to_exp else 0)
                store1_i64(softmax_ptr + S_AT, s_old_ptr + j * VECTOR_BYTES)
                store1_i64(softmax_ptr + P_AT, p_new_ptr + (j >> 1) * VECTOR_BYTES)
                first, end = dims_of_step(params, i)
                if to_add == 0:
                    end = first
                adding = (add_key, p_old_ptr, to_add, first, end, add_width, acc_ptr, alphas_ptr)
                step(params, scoring, softmax_ptr, adding, scratch_ptr)
            for x in range(exp_width if to_exp > 0 else 0):
                end_softmax(params, exp_at + x, x, softmax_ptr, scratch_ptr)
            if non_finite_values and to_add > 0:
                for x in range(add_width):
                    p_ptr, pos = p_old_ptr + x * PANEL_P_BYTES, kv_pos + add_key
                    add_non_finite(params, v_list_ptr + 8 * add_key, add_at + x, p_ptr, pos, to_add, scratch_ptr)
            add_at, add_key, to_add = exp_at, exp_key, to_exp
            exp_at, exp_key, to_exp = score_at, score_key, to_score
            score_key += BLOCK_N

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
        """Attends all panels of a tile to the keys of one work item, whose rows are listed a pack
        ahead."""
        kv_idx, n_end = work_item[tiling.N_BEGIN], work_item[tiling.N_END]
        k_list_ptr, v_list_ptr = scratch_ptr + params.k_list_offset, scratch_ptr + params.v_list_offset
        next_k_list_ptr, next_v_list_ptr = k_list_ptr + 8 * PACK_N, v_list_ptr + 8 * PACK_N
        kv_pos, _ = tiling.key_tile(runs, sequence, kv_idx, n_end, PACK_N)
        num_keys = 0
        while True:
            kv_idx += num_keys
            next_pos, count = tiling.key_tile(runs, sequence, kv_idx, n_end, PACK_N)
            list_rows(params, k_blocks, next_pos, count, count, next_k_list_ptr)
            list_rows(params, v_blocks, next_pos, count, count, next_v_list_ptr)
            if num_keys > 0:
                lists = k_list_ptr, v_list_ptr, next_k_list_ptr, next_v_list_ptr
                attend_pack(params, num_panels, kv_pos, num_keys, lists, count, scratch_ptr)
            k_list_ptr, next_k_list_ptr = next_k_list_ptr, k_list_ptr
            v_list_ptr, next_v_list_ptr = next_v_list_ptr, v_list_ptr
            kv_pos, num_keys = next_pos, count
            if kv_idx >= n_end:
                break

    return attend_keys
