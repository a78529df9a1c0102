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
from numba_prefix.cpu.kernel.params import BFLOAT, BLOCK_N, COLUMN_P, COLUMN_S, PACK_N, PAIR_DIMS, STEP_N, STEPS, STRIP
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
from numba_prefix.cpu.kernel.prefill_f32 import is_edge_strip, last_of_lane
from numba_prefix.cpu.kernel.prefill_f32_gemm import COLUMN_ROW
from numba_prefix.cpu.kernel.row_state import set_lane
from numba_prefix.cpu.simd.bf16_pairs import first_of_pairs, second_of_pairs
from numba_prefix.cpu.simd.memory import (
    any_lane,
    fma,
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
from numba_prefix.rules.elementwise import where
from numba_prefix.rules.masks import is_visible
from numba_prefix.rules.tiling import ceil_div, lane_rows, round_up

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
NEG_INF = np.float32(-np.inf)


@inline
def part_bytes(call: Any) -> Any:
    """Of one row of keys, or of values before they are transposed."""
    return round_up(call[c.HEAD_SIZE], PAIR_DIMS) * BFLOAT


@inline
def column_q(call: Any) -> Any:
    """Bytes of one column of Q_T."""
    return call[c.PARTS] * (part_bytes(call) // 4) * COLUMN_ROW


@inline
def column_acc(call: Any) -> Any:
    return round_up(call[c.HEAD_SIZE], 16) * COLUMN_ROW


@inline
def buffer_of(call: Any, name: Any, turn: Any, scratch: Any) -> Any:
    """One of the two buffers of S or P, in turns."""
    size = STRIP * COLUMN_S if name == c.S else call[c.PARTS] * call[c.P_PART]
    return scratch + call[name] + (turn & 1) * size


@part
def load_queries(
    call: Any, factors: Any, sequence: Any, runs: Any, first_row: Any, rows: Any, kv_head: Any, scratch: Any
) -> None:
    """Query rows as columns of pairs [part][pair of dimensions, 16], and what the rules need of each row. Lanes past the last
    row repeat it, so that they never widen a key range."""
    row, packed = scratch + call[c.ROWS], scratch + call[c.K_ROWS]
    pitch, row_pairs = call[c.K_PITCH], call[c.PARTS] * (round_up(call[c.HEAD_SIZE], PAIR_DIMS) // 2)
    is_special = False
    for lane in range(lane_rows(rows)):
        source = set_lane(call, sequence, runs, first_row + min(lane, rows - 1), kv_head, lane, scratch)
        load_query(call, factors, source, row)
        if pack_query(call, row, packed + (lane & 15) * pitch):
            is_special = True
        if lane & 15 == 15:
            column = scratch + call[c.Q_T] + (lane >> 4) * column_q(call)
            for i in range(0, row_pairs, 16):
                transpose_block(packed + 4 * i, pitch, column + i * COLUMN_ROW, COLUMN_ROW)
    store1_i64(scratch + call[c.IS_SPECIAL], 1 if is_special and call[c.PARTS] == 2 else 0)
    clear_row(call, scratch)


@part
def careful_scores(call: Any, rows: Any, column: Any, s: Any, num_keys: Any, scratch: Any) -> None:
    """Mends the products of one column of float16 rows with keys where one of them is not finite: a part of 0 may have met
    an infinity. Others keep their bits."""
    q_t = scratch + call[c.Q_T] + column * column_q(call)
    q_low = (round_up(call[c.HEAD_SIZE], PAIR_DIMS) // 2) * COLUMN_ROW
    for j in range(num_keys):
        product = load_f32(s + j * COLUMN_ROW)
        if any_lane(is_not_finite(product)):
            source, total = load1_i64(rows + 8 * j), splat_f32(ZERO)
            for d in range(call[c.HEAD_SIZE]):
                high = load_i32(q_t + (d >> 1) * COLUMN_ROW)
                low = load_i32(q_t + (d >> 1) * COLUMN_ROW + q_low)
                first, second = first_of_pairs(high) + first_of_pairs(low), second_of_pairs(high) + second_of_pairs(low)
                q = second if d & 1 else first
                total = fma(q, splat_f32(load_one(c.FLOAT16, source + BFLOAT * d)), total)
            store_f32(s + j * COLUMN_ROW, where(is_not_finite(product), total, product))


@inline
def add_special_of(
    dtype: Any, call: Any, rows: Any, column: Any, p: Any, kv_pos: Any, num_keys: Any, scratch: Any
) -> None:
    last = load_i32(scratch + call[c.LAST] + column * COLUMN_ROW)
    acc = scratch + call[c.ACC] + column * column_acc(call)
    for j in range(num_keys):
        source, pairs = load1_i64(rows + 8 * j), load_i32(p + (j >> 1) * COLUMN_ROW)
        w = second_of_pairs(pairs) if j & 1 else first_of_pairs(pairs)
        seen = is_visible(splat_i32(kv_pos + j), last)
        for d in range(call[c.HEAD_SIZE]):
            value = load_one(dtype, source + BFLOAT * d)
            if value - value != ZERO:
                at = acc + d * COLUMN_ROW
                store_f32(at, where(seen, load_f32(at) + w * splat_f32(value), load_f32(at)))


@part
def add_special(call: Any, rows: Any, column: Any, p: Any, kv_pos: Any, num_keys: Any, scratch: Any) -> None:
    """Adds values that are not finite, which the product had as 0, to the rows of a column that see them: a hidden key's
    weight of 0 must not meet them."""
    if call[c.PARTS] == 2:
        add_special_of(c.FLOAT16, call, rows, column, p, kv_pos, num_keys, scratch)
    else:
        add_special_of(c.BFLOAT16, call, rows, column, p, kv_pos, num_keys, scratch)


@inline
def keys_of_strip(call: Any, strip: Any, columns: Any, kv_pos: Any, num_keys: Any, scratch: Any) -> Any:
    """How many of the keys some row of a strip sees; 0 past the last strip."""
    end = min((strip + 1) * STRIP, columns)
    if strip * STRIP >= columns:
        return 0
    return max(0, min(num_keys, last_of_lane(call, end * 16 - 1, scratch) + 1 - kv_pos))


@inline
def dims_of_step(call: Any, i: Any) -> Any:
    """The first and one past the last of the dimensions that step i of STEPS adds to."""
    dims = ceil_div(call[c.HEAD_SIZE], PAIR_DIMS)
    return dims * i // STEPS * PAIR_DIMS, min(dims * (i + 1) // STEPS * PAIR_DIMS, round_up(call[c.HEAD_SIZE], 16))


def make_attend(pack_values: Any, scale_acc: Any, step: Any) -> Any:
    """attend_keys of a path, of its micro-kernels:

    pack_values  V_ROWS from a list of rows, of which there are a multiple of STEP_N
    scale_acc    (call, acc, alpha): a column's accumulators times alpha, unless step does that
    step         (call, scoring, weighing, adding, scratch): a share of three meetings' work, of which any may have none

        scoring   (keys, q_t, width, s): the products of STEP_N keys with `width` columns; none if width is 0
        weighing  the record of weights.py: NUM_UNITS units (weigh_unit)
        adding    (key, p, num_keys, first, end, width, acc, alphas): to dimensions `first` to `end` of `width` columns, the
                  products of the values from `key` on and their weights; none if first is end
    """

    @part
    def attend_block(
        call: Any,
        factors: Any,
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
        special_scores = pack_rows(call, False, keys, num_keys, scratch + call[c.K_ROWS], scratch + call[c.ROWS])
        special_scores = special_scores or load1_i64(scratch + call[c.IS_SPECIAL]) != 0
        list_zeros(values, num_keys, round_up(num_keys, STEP_N), scratch + call[c.ZERO_ROW])
        special_values = pack_values(call, False, values, num_keys, scratch)
        if special_values:
            pack_values(call, True, values, num_keys, scratch)
        row_bytes = call[c.HEAD_SIZE] * item_bytes(call[c.DTYPE])
        turns = ceil_div(columns, STRIP) * ceil_div(num_keys, BLOCK_N) + 2
        # A strip's first column, and which of the keys: what a turn scores, the next one weighs and the one after that adds.
        scored = weighed = added = 0
        score_key = weigh_key = add_key = 0
        to_weigh = to_add = 0
        is_grown = False
        weighing = scratch + call[c.WEIGHING]
        store1_f32(weighing + UNIT_LOG2, factors[c.UNIT_LOG2])
        store1_i64(weighing + TO_LOW, call[c.P_PART] if call[c.PARTS] == 2 else 0)
        for turn in range(turns):
            while scored < columns and score_key >= keys_of_strip(
                call, scored // STRIP, columns, kv_pos, num_keys, scratch
            ):
                scored, score_key = scored + STRIP, 0
            seen = keys_of_strip(call, scored // STRIP, columns, kv_pos, num_keys, scratch)
            to_score = min(BLOCK_N, seen - score_key)
            if scored >= columns:
                to_score = 0
            if to_score + to_weigh + to_add == 0:
                break
            asked = num_next * turn // turns
            count = num_next * (turn + 1) // turns - asked
            prefetch_rows(next_keys + 8 * asked, count, row_bytes)
            prefetch_rows(next_values + 8 * asked, count, row_bytes)
            s_new, s_old = buffer_of(call, c.S, turn, scratch), buffer_of(call, c.S, turn + 1, scratch)
            p_new, p_old = buffer_of(call, c.P, turn, scratch), buffer_of(call, c.P, turn + 1, scratch)
            score_width, weigh_width = min(STRIP, columns - scored), min(STRIP, columns - weighed)
            add_width = min(STRIP, columns - added)
            acc, alphas = scratch + call[c.ACC] + added * column_acc(call), alphas_of(turn + 1, weighing)
            if to_add > 0 and is_grown:
                for v in range(add_width):
                    scale_acc(call, acc + v * column_acc(call), alphas + v * COLUMN_ROW)
            is_grown = False
            if to_weigh > 0:
                is_edge = is_edge_strip(call, weighed, kv_pos + weigh_key + to_weigh - 1, scratch)
                for v in range(weigh_width):
                    s, column, pos = s_old + v * COLUMN_S, weighed + v, kv_pos + weigh_key
                    if special_scores:
                        careful_scores(call, keys + 8 * weigh_key, column, s, to_weigh, scratch)
                    own = column, v, s, alphas_of(turn, weighing)
                    if begin_weights(call, factors, *own, is_edge, pos, to_weigh, weighing, scratch):
                        is_grown = True
            key_rows = scratch + call[c.K_ROWS] + score_key * call[c.K_PITCH]
            q_t = scratch + call[c.Q_T] + scored * column_q(call)
            for i in range(STEPS):
                j = i * STEP_N
                scoring = (
                    key_rows + j * call[c.K_PITCH],
                    q_t,
                    score_width if j < to_score else 0,
                    s_new + j * COLUMN_ROW,
                )
                store1_i64(weighing + NUM_UNITS, weigh_width * UNITS if j < to_weigh else 0)
                store1_i64(weighing + S_AT, s_old + j * COLUMN_ROW)
                store1_i64(weighing + P_AT, p_new + (j >> 1) * COLUMN_ROW)
                first, end = dims_of_step(call, i)
                if to_add == 0:
                    end = first
                adding = (add_key, p_old, to_add, first, end, add_width, acc, alphas)
                step(call, scoring, weighing, adding, scratch)
            for v in range(weigh_width if to_weigh > 0 else 0):
                end_weights(call, weighed + v, v, weighing, scratch)
            if special_values and to_add > 0:
                for v in range(add_width):
                    p, pos = p_old + v * COLUMN_P, kv_pos + add_key
                    add_special(call, values + 8 * add_key, added + v, p, pos, to_add, scratch)
            added, add_key, to_add = weighed, weigh_key, to_weigh
            weighed, weigh_key, to_weigh = scored, score_key, to_score
            score_key += BLOCK_N

    @part
    def attend_keys(
        call: Any,
        factors: Any,
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
        keys, values = scratch + call[c.KEY_LIST], scratch + call[c.VALUE_LIST]
        next_keys, next_values = keys + 8 * PACK_N, values + 8 * PACK_N
        kv_pos, num_keys = tiling.kv_pos_of_key(runs, tiling.run_of_key(runs, sequence, kv_idx), kv_idx), 0
        while True:
            kv_idx += num_keys
            run = tiling.run_of_key(runs, sequence, kv_idx)
            next_pos = tiling.kv_pos_of_key(runs, run, kv_idx)
            count = tiling.keys_in_block(runs, run, kv_idx, n_end, PACK_N)
            list_rows(call, k, call[c.K_BLOCK], call[c.K_SLOT], table, next_pos, count, count, next_keys)
            list_rows(call, v, call[c.V_BLOCK], call[c.V_SLOT], table, next_pos, count, count, next_values)
            if num_keys > 0:
                attend_block(
                    call, factors, columns, kv_pos, num_keys, keys, values, next_keys, next_values, count, scratch
                )
            keys, next_keys = next_keys, keys
            values, next_values = next_values, values
            kv_pos, num_keys = next_pos, count
            if kv_idx >= n_end:
                break

    return attend_keys
