"""The inner loops of the paths for 16-bit inputs, which multiply pairs of bfloat16: AMX tiles, or vdpbf16ps on vectors.

    S^T[key, row] += K[key, pair] . Q^T[pair, row]    a pair: two dimensions
    O^T[dim, row] += V^T[dim, pair] . P^T[pair, row]  a pair: two keys

Weights of bfloat16 inputs are rounded to bfloat16. float16 inputs and their weights are two bfloat16 each, high + low, and of
the four products of values and weights that of the low parts is left out: 2**-16 of the whole, where float16 rounds by 2**-11.

These instructions take numbers below 2**-126 (1.2e-38) as 0, in and out, as those of other paths do not.

Up to PACK_N keys and values are packed, then strips of two columns meet them, BLOCK_N at a time. Three such meetings are under
way at once: the scores of one, the weights of the one before, the output of the one before that, in steps of 32 keys, so that
vector instructions have work while the tile unit has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline, part
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.paged_kv import item_bytes, list_rows, load_one, load_query, prefetch_rows
from numba_prefix.cpu.kernel.prefill_bf16_pack import clear_row, list_zeros, pack_query, pack_rows
from numba_prefix.cpu.kernel.prefill_bf16_softmax import (
    NUM_UNITS,
    P_AT,
    S_AT,
    TO_LOW,
    UNIT_LOG2,
    UNITS,
    alphas_of,
    begin_weights,
    end_weights,
)
from numba_prefix.cpu.kernel.row_state import range_of_lanes, set_lane
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
def part_bytes(params: Any) -> Any:
    """Of one row of keys, or of values before they are transposed."""
    return round_up(params.head_size, PAIR_DIMS) * BFLOAT


@inline
def column_q(params: Any) -> Any:
    """Bytes of one column of Q_T."""
    return params.planes * (part_bytes(params) // 4) * VECTOR_BYTES


@inline
def column_acc(params: Any) -> Any:
    return round_up(params.head_size, 16) * VECTOR_BYTES


@inline
def s_of_turn(params: Any, turn: Any, scratch: Any) -> Any:
    """One of the two buffers of scores, in turns."""
    return scratch + params.s_offset + (turn & 1) * (STRIP * PANEL_S_BYTES)


@inline
def p_of_turn(params: Any, turn: Any, scratch: Any) -> Any:
    """One of the two buffers of probabilities, in turns."""
    return scratch + params.p_offset + (turn & 1) * (params.planes * params.p_plane_bytes)


@part
def load_queries(params: Any, sequence: Any, runs: Any, first_row: Any, rows: Any, kv_head: Any, scratch: Any) -> None:
    """Query rows as columns of pairs [part][pair of dimensions, 16], and what the rules need of each row. Lanes past the last
    row repeat it, so that they never widen a key range."""
    row, packed = scratch + params.staging_offset, scratch + params.k_rows_offset
    pitch, row_pairs = params.k_pitch, params.planes * (round_up(params.head_size, PAIR_DIMS) // 2)
    is_special = False
    for lane in range(lane_rows(rows)):
        source = set_lane(params, sequence, runs, first_row + min(lane, rows - 1), kv_head, lane, scratch)
        load_query(params, source, row)
        if pack_query(params, row, packed + (lane & 15) * pitch):
            is_special = True
        if lane & 15 == 15:
            column = scratch + params.q_t_offset + (lane >> 4) * column_q(params)
            for i in range(0, row_pairs, 16):
                transpose_block(packed + 4 * i, pitch, column + i * VECTOR_BYTES, VECTOR_BYTES)
    store1_i64(scratch + params.non_finite_offset, 1 if is_special and params.planes == 2 else 0)
    clear_row(params, scratch)


@part
def careful_scores(params: Any, rows: Any, column: Any, s: Any, num_keys: Any, scratch: Any) -> None:
    """Mends the products of one column of float16 rows with keys where one of them is not finite: a part of 0 may have met
    an infinity. Others keep their bits."""
    q_t = scratch + params.q_t_offset + column * column_q(params)
    q_low = (round_up(params.head_size, PAIR_DIMS) // 2) * VECTOR_BYTES
    for j in range(num_keys):
        product = load_f32(s + j * VECTOR_BYTES)
        if any_lane(is_not_finite(product)):
            source, total = load1_i64(rows + 8 * j), splat_f32(ZERO)
            for d in range(params.head_size):
                high = load_i32(q_t + (d >> 1) * VECTOR_BYTES)
                low = load_i32(q_t + (d >> 1) * VECTOR_BYTES + q_low)
                first, second = first_of_pairs(high) + first_of_pairs(low), second_of_pairs(high) + second_of_pairs(low)
                q = second if d & 1 else first
                total = multiply_add(q, splat_f32(load_one(c.FLOAT16, source + BFLOAT * d)), total)
            store_f32(s + j * VECTOR_BYTES, where(is_not_finite(product), total, product))


@inline
def add_special_of(
    dtype: Any, params: Any, rows: Any, column: Any, p: Any, kv_pos: Any, num_keys: Any, scratch: Any
) -> None:
    begin = load_i32(scratch + params.begin_offset + column * VECTOR_BYTES)
    end = load_i32(scratch + params.end_offset + column * VECTOR_BYTES)
    acc = scratch + params.acc_offset + column * column_acc(params)
    for j in range(num_keys):
        source, pairs = load1_i64(rows + 8 * j), load_i32(p + (j >> 1) * VECTOR_BYTES)
        w = second_of_pairs(pairs) if j & 1 else first_of_pairs(pairs)
        seen = is_visible(splat_i32(kv_pos + j), begin, end)
        for d in range(params.head_size):
            value = load_one(dtype, source + BFLOAT * d)
            if value - value != ZERO:
                at = acc + d * VECTOR_BYTES
                store_f32(at, where(seen, load_f32(at) + w * splat_f32(value), load_f32(at)))


@part
def add_special(params: Any, rows: Any, column: Any, p: Any, kv_pos: Any, num_keys: Any, scratch: Any) -> None:
    """Adds values that are not finite, which the product had as 0, to the rows of a column that see them: a hidden key's
    weight of 0 must not meet them."""
    if params.planes == 2:
        add_special_of(c.FLOAT16, params, rows, column, p, kv_pos, num_keys, scratch)
    else:
        add_special_of(c.BFLOAT16, params, rows, column, p, kv_pos, num_keys, scratch)


@inline
def keys_of_strip(params: Any, column: Any, columns: Any, kv_pos: Any, num_keys: Any, scratch: Any) -> Any:
    """Of the keys from kv_pos on, those that some row of a strip sees: the first, as a whole number of BLOCK_N, and one past
    the last. None past the last strip."""
    first, stop = 0, 0
    if column < columns:
        begin, _, _, end = range_of_lanes(params, 16 * column, 16 * min(column + STRIP, columns) - 1, scratch)
        first, stop = tiling.keys_between(begin, end, kv_pos, num_keys)
    return first // BLOCK_N * BLOCK_N, stop


@inline
def dims_of_step(params: Any, i: Any) -> Any:
    """The first and one past the last of the dimensions that step i of STEPS adds to."""
    dims = ceil_div(params.head_size, PAIR_DIMS)
    return dims * i // STEPS * PAIR_DIMS, min(dims * (i + 1) // STEPS * PAIR_DIMS, round_up(params.head_size, 16))


def make_attend(pack_values: Any, scale_acc: Any, step: Any) -> Any:
    """attend_keys of a path, of its micro-kernels:

    pack_values  V_ROWS from a list of rows, of which there are a multiple of STEP_N
    scale_acc    (params, acc, alpha): a column's accumulators times alpha, unless step does that
    step         (params, scoring, weighing, adding, scratch): a share of three meetings' work, of which any may have none

        scoring   (keys, q_t, width, s): the products of STEP_N keys with `width` columns; none if width is 0
        weighing  the record of weights.py: NUM_UNITS units (weigh_unit)
        adding    (key, p, num_keys, first, end, width, acc, alphas): to dimensions `first` to `end` of `width` columns, the
                  products of the values from `key` on and their weights; none if first is end
    """

    @part
    def attend_block(
        params: Any,
        columns: Any,
        kv_pos: Any,
        num_keys: Any,
        keys: Any,
        values: Any,
        next_keys: Any,
        next_values: Any,
        num_next: Any,
        scratch: Any,
    ) -> None:
        """All strips against up to PACK_N keys, BLOCK_N at a time; meanwhile the next rows come into the cache."""
        special_scores = pack_rows(
            params, False, keys, num_keys, scratch + params.k_rows_offset, scratch + params.staging_offset
        )
        special_scores = special_scores or load1_i64(scratch + params.non_finite_offset) != 0
        list_zeros(values, num_keys, round_up(num_keys, STEP_N), scratch + params.zero_row_offset)
        special_values = pack_values(params, False, values, num_keys, scratch)
        if special_values:
            pack_values(params, True, values, num_keys, scratch)
        row_bytes = params.head_size * item_bytes(params.dtype)
        turns = ceil_div(columns, STRIP) * ceil_div(num_keys, BLOCK_N) + 2
        # A strip's first column, and which of the keys: what a turn scores, the next one weighs and the one after that adds.
        scored = weighed = added = 0
        weigh_key = add_key = 0
        score_key, stop = keys_of_strip(params, 0, columns, kv_pos, num_keys, scratch)
        to_weigh = to_add = 0
        is_grown = False
        weighing = scratch + params.softmax_offset
        store1_f32(weighing + UNIT_LOG2, params.unit_log2)
        store1_i64(weighing + TO_LOW, params.p_plane_bytes if params.planes == 2 else 0)
        for turn in range(turns):
            while scored < columns and score_key >= stop:
                scored += STRIP
                score_key, stop = keys_of_strip(params, scored, columns, kv_pos, num_keys, scratch)
            to_score = min(BLOCK_N, stop - score_key)
            if scored >= columns:
                to_score = 0
            if to_score + to_weigh + to_add == 0:
                break
            asked = num_next * turn // turns
            count = num_next * (turn + 1) // turns - asked
            prefetch_rows(next_keys + 8 * asked, count, row_bytes)
            prefetch_rows(next_values + 8 * asked, count, row_bytes)
            s_new, s_old = s_of_turn(params, turn, scratch), s_of_turn(params, turn + 1, scratch)
            p_new, p_old = p_of_turn(params, turn, scratch), p_of_turn(params, turn + 1, scratch)
            score_width, weigh_width = min(STRIP, columns - scored), min(STRIP, columns - weighed)
            add_width = min(STRIP, columns - added)
            acc, alphas = scratch + params.acc_offset + added * column_acc(params), alphas_of(turn + 1, weighing)
            if to_add > 0 and is_grown:
                for v in range(add_width):
                    scale_acc(params, acc + v * column_acc(params), alphas + v * VECTOR_BYTES)
            is_grown = False
            if to_weigh > 0:
                _, full_begin, full_end, _ = range_of_lanes(
                    params, 16 * weighed, 16 * (weighed + weigh_width) - 1, scratch
                )
                is_edge = tiling.is_edge(full_begin, full_end, kv_pos + weigh_key, to_weigh)
                for v in range(weigh_width):
                    s, column, pos = s_old + v * PANEL_S_BYTES, weighed + v, kv_pos + weigh_key
                    if special_scores:
                        careful_scores(params, keys + 8 * weigh_key, column, s, to_weigh, scratch)
                    own = column, v, s, alphas_of(turn, weighing)
                    if begin_weights(params, *own, is_edge, pos, to_weigh, weighing, scratch):
                        is_grown = True
            key_rows = scratch + params.k_rows_offset + score_key * params.k_pitch
            q_t = scratch + params.q_t_offset + scored * column_q(params)
            for i in range(STEPS):
                j = i * STEP_N
                scoring = (
                    key_rows + j * params.k_pitch,
                    q_t,
                    score_width if j < to_score else 0,
                    s_new + j * VECTOR_BYTES,
                )
                store1_i64(weighing + NUM_UNITS, weigh_width * UNITS if j < to_weigh else 0)
                store1_i64(weighing + S_AT, s_old + j * VECTOR_BYTES)
                store1_i64(weighing + P_AT, p_new + (j >> 1) * VECTOR_BYTES)
                first, end = dims_of_step(params, i)
                if to_add == 0:
                    end = first
                adding = (add_key, p_old, to_add, first, end, add_width, acc, alphas)
                step(params, scoring, weighing, adding, scratch)
            for v in range(weigh_width if to_weigh > 0 else 0):
                end_weights(params, weighed + v, v, weighing, scratch)
            if special_values and to_add > 0:
                for v in range(add_width):
                    p, pos = p_old + v * PANEL_P_BYTES, kv_pos + add_key
                    add_special(params, values + 8 * add_key, added + v, p, pos, to_add, scratch)
            added, add_key, to_add = weighed, weigh_key, to_weigh
            weighed, weigh_key, to_weigh = scored, score_key, to_score
            score_key += BLOCK_N

    @part
    def attend_keys(
        params: Any,
        entry: Any,
        sequence: Any,
        runs: Any,
        table: Any,
        columns: Any,
        k: Any,
        v: Any,
        scratch: Any,
    ) -> None:
        """All columns of a tile against the keys of one work item, whose rows are listed a block ahead."""
        kv_idx, n_end = entry[tiling.N_BEGIN], entry[tiling.N_END]
        keys, values = scratch + params.k_list_offset, scratch + params.v_list_offset
        next_keys, next_values = keys + 8 * PACK_N, values + 8 * PACK_N
        kv_pos, _ = tiling.key_tile(runs, sequence, kv_idx, n_end, PACK_N)
        num_keys = 0
        while True:
            kv_idx += num_keys
            next_pos, count = tiling.key_tile(runs, sequence, kv_idx, n_end, PACK_N)
            list_rows(params, k, params.k_block_stride, params.k_slot_stride, table, next_pos, count, count, next_keys)
            list_rows(
                params, v, params.v_block_stride, params.v_slot_stride, table, next_pos, count, count, next_values
            )
            if num_keys > 0:
                attend_block(params, columns, kv_pos, num_keys, keys, values, next_keys, next_values, count, scratch)
            keys, next_keys = next_keys, keys
            values, next_values = next_values, values
            kv_pos, num_keys = next_pos, count
            if kv_idx >= n_end:
                break

    return attend_keys
