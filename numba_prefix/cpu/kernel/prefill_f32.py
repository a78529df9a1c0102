"""The inner loops of path `vector`: columns of query rows against keys and values that are widened to float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline, part
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.paged_kv import has_special, item_bytes, list_rows, load_pages, load_query, prefetch_rows
from numba_prefix.cpu.kernel.params import BLOCK_N
from numba_prefix.cpu.kernel.prefill_f32_gemm import (
    COLUMN_ROW,
    FLOAT,
    MR,
    NV,
    output_product,
    output_product_1,
    score_product,
    score_product_1,
)
from numba_prefix.cpu.kernel.row_state import set_lane
from numba_prefix.cpu.kernel.scores import gather_entries, score_column, weigh_column
from numba_prefix.cpu.simd.memory import (
    fma,
    load1_f32,
    load1_i32,
    load_f32,
    load_i32,
    load_i64,
    splat_f32,
    splat_i32,
    store_f32,
    transpose_block,
)
from numba_prefix.rules import tiling
from numba_prefix.rules.elementwise import where
from numba_prefix.rules.masks import is_visible
from numba_prefix.rules.softmax import rescale, shift_of
from numba_prefix.rules.tiling import lane_rows, round_up

ZERO = np.float32(0.0)
# Products are summed in chunks of this many dimensions (half as many for small heads): 0.6 to 0.8 of the rounding error of
# one chain, for one addition in CHUNK.
CHUNK = 64


@part
def load_queries(
    call: Any, factors: Any, sequence: Any, runs: Any, first_row: Any, rows: Any, kv_head: Any, scratch: Any
) -> None:
    """Query rows as columns of 16 lanes [head_size, 16], and what the rules need of each row. Lanes past the last row
    repeat it, so that they never widen a key range."""
    pitch = call[c.PITCH]
    depth = round_up(call[c.HEAD_SIZE], 16)
    row_buffer = scratch + call[c.ROWS]
    for lane in range(lane_rows(rows)):
        source = set_lane(call, sequence, runs, first_row + min(lane, rows - 1), kv_head, lane, scratch)
        load_query(call, factors, source, row_buffer + (lane & 15) * pitch)
        if lane & 15 == 15:
            column = scratch + call[c.Q_T] + (lane >> 4) * depth * COLUMN_ROW
            for i in range(0, depth, 16):
                transpose_block(row_buffer + 4 * i, pitch, column + i * COLUMN_ROW, COLUMN_ROW)


@inline
def apply_rules(
    call: Any, factors: Any, column: Any, s: Any, is_edge: Any, kv_pos: Any, num_keys: Any, m_old: Any, scratch: Any
) -> Any:
    """Turns the products of one column at s into scores; returns the new running max."""
    origin = load_i32(scratch + call[c.ORIGIN] + column * COLUMN_ROW)
    last = load_i32(scratch + call[c.LAST] + column * COLUMN_ROW)
    slope = load_f32(scratch + call[c.ROW_SLOPES] + column * COLUMN_ROW)
    kv_lane = splat_i32(0)
    entries = scratch + call[c.ENTRIES]
    if call[c.BIAS] >= c.TEMPLATE_LINEAR:
        base = load_i64(scratch + call[c.MASK_BASE] + 2 * column * COLUMN_ROW)
        q_pos = load_i32(scratch + call[c.Q_POS] + column * COLUMN_ROW)
        gather_entries(call, base, q_pos, kv_pos, kv_lane, 1, num_keys, entries, scratch + call[c.ROWS])
    return score_column(
        call, is_edge, s, entries, num_keys, kv_pos, 1, kv_lane, factors[c.QK_SCALE], slope, origin, last, m_old
    )


@part
def score_strip(
    call: Any, factors: Any, column: Any, s: Any, is_edge: Any, kv_pos: Any, num_keys: Any, scratch: Any
) -> None:
    """One column, its products at s, from products to weights; leaves alpha for the output product."""
    state = scratch + call[c.STATE] + 2 * column * COLUMN_ROW
    m_old = load_f32(state)
    m_i = apply_rules(call, factors, column, s, is_edge, kv_pos, num_keys, m_old, scratch)
    shift = shift_of(m_i)
    unit_log2 = factors[c.UNIT_LOG2]
    alpha = rescale(m_old, shift, unit_log2)
    l_i = fma(load_f32(state + COLUMN_ROW), alpha, weigh_column(s, num_keys, shift, unit_log2))
    store_f32(state, m_i)
    store_f32(state + COLUMN_ROW, l_i)
    store_f32(scratch + call[c.ALPHA] + column * COLUMN_ROW, alpha)


@part
def careful_output(call: Any, column: Any, s: Any, kv_pos: Any, num_keys: Any, scratch: Any) -> None:
    """The output product of one column with values that are not finite: a weight of zero must not meet them. The same
    sums in the same order as the micro-kernel, so that rows which do not see such a value get the same bits."""
    last = load_i32(scratch + call[c.LAST] + column * COLUMN_ROW)
    alpha = load_f32(scratch + call[c.ALPHA] + column * COLUMN_ROW)
    depth = round_up(call[c.HEAD_SIZE], 16)
    acc = scratch + call[c.ACC] + column * depth * COLUMN_ROW
    for i in range(depth):
        total = splat_f32(ZERO)
        for j in range(num_keys):
            value = splat_f32(load1_f32(scratch + call[c.V_ROWS] + j * call[c.PITCH] + 4 * i))
            seen = fma(load_f32(s + j * COLUMN_ROW), value, total)
            total = where(is_visible(splat_i32(kv_pos + j), last), seen, total)
        store_f32(acc + i * COLUMN_ROW, fma(alpha, load_f32(acc + i * COLUMN_ROW), total))


@part
def attend_strip(
    call: Any, factors: Any, column: Any, width: Any, kv_pos: Any, num_keys: Any, special: Any, scratch: Any
) -> None:
    """`width` columns against num_keys keys in scratch: score product, rule chain, output product."""
    head_size, pitch = call[c.HEAD_SIZE], call[c.PITCH]
    depth = round_up(head_size, 16)
    q_t = scratch + call[c.Q_T] + column * depth * COLUMN_ROW
    s = scratch + call[c.S]
    acc = scratch + call[c.ACC] + column * depth * COLUMN_ROW
    alpha = scratch + call[c.ALPHA] + column * COLUMN_ROW
    k_rows, v_rows = scratch + call[c.K_ROWS], scratch + call[c.V_ROWS]
    column_q, column_s = depth * COLUMN_ROW, BLOCK_N * COLUMN_ROW
    is_edge = is_edge_strip(call, column, kv_pos + num_keys - 1, scratch)
    chunk = CHUNK if head_size >= 2 * CHUNK else CHUNK // 2
    for d in range(0, head_size, chunk):
        steps, q_rows = min(chunk, head_size - d), q_t + d * COLUMN_ROW
        for j in range(0, num_keys, MR):
            keys = k_rows + j * pitch + FLOAT * d
            if width == 1:
                score_product_1(keys, pitch, q_rows, column_q, steps, s + j * COLUMN_ROW, column_s, min(d, 1))
            else:
                score_product(keys, pitch, q_rows, column_q, steps, s + j * COLUMN_ROW, column_s, min(d, 1))
    for v in range(width):
        score_strip(call, factors, column + v, s + v * column_s, is_edge, kv_pos, num_keys, scratch)
    if special and is_edge:
        for v in range(width):
            careful_output(call, column + v, s + v * column_s, kv_pos, num_keys, scratch)
        return
    for i in range(0, depth, MR):
        if width == 1:
            output_product_1(v_rows + 4 * i, pitch, s, column_s, num_keys, acc + i * COLUMN_ROW, column_q, alpha)
        else:
            output_product(v_rows + 4 * i, pitch, s, column_s, num_keys, acc + i * COLUMN_ROW, column_q, alpha)


@inline
def last_of_lane(call: Any, lane: Any, scratch: Any) -> Any:
    return np.int64(load1_i32(scratch + call[c.LAST] + 4 * lane))


@inline
def is_edge_strip(call: Any, column: Any, last_key: Any, scratch: Any) -> Any:
    """Whether some row of the strip (its first sees least) does not see all keys up to last_key."""
    return last_of_lane(call, column * 16, scratch) < last_key


@part
def list_next(
    call: Any, sequence: Any, runs: Any, kv_idx: Any, n_end: Any, table: Any, k: Any, v: Any, scratch: Any
) -> Any:
    """Lists the rows of the block of keys that begins at kv_idx; returns how many they are."""
    run = tiling.run_of_key(runs, sequence, kv_idx)
    kv_pos = tiling.kv_pos_of_key(runs, run, kv_idx)
    num_keys = tiling.keys_in_block(runs, run, kv_idx, n_end, BLOCK_N)
    list_rows(call, k, call[c.K_BLOCK], call[c.K_SLOT], table, kv_pos, num_keys, num_keys, scratch + call[c.KEY_LIST])
    list_rows(call, v, call[c.V_BLOCK], call[c.V_SLOT], table, kv_pos, num_keys, num_keys, scratch + call[c.VALUE_LIST])
    return num_keys


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
    """All columns of a tile against the keys of one work item; meanwhile the next block's rows come into the cache."""
    row_bytes = call[c.HEAD_SIZE] * item_bytes(call[c.DTYPE])
    kv_idx, n_end = entry[tiling.N_BEGIN], entry[tiling.N_END]
    while kv_idx < n_end:
        run = tiling.run_of_key(runs, sequence, kv_idx)
        kv_pos = tiling.kv_pos_of_key(runs, run, kv_idx)
        num_keys = tiling.keys_in_block(runs, run, kv_idx, n_end, BLOCK_N)
        kv_idx += num_keys
        load_pages(call, k, call[c.K_BLOCK], call[c.K_SLOT], table, kv_pos, num_keys, scratch + call[c.K_ROWS])
        load_pages(call, v, call[c.V_BLOCK], call[c.V_SLOT], table, kv_pos, num_keys, scratch + call[c.V_ROWS])
        special = False
        if is_edge_strip(call, 0, kv_pos + num_keys - 1, scratch):
            special = has_special(scratch + call[c.V_ROWS], call[c.PITCH], num_keys, call[c.HEAD_SIZE])
        num_next = list_next(call, sequence, runs, kv_idx, n_end, table, k, v, scratch)
        for column in range(0, columns, NV):
            width = min(NV, columns - column)
            first = num_next * column // columns
            count = num_next * (column + width) // columns - first
            prefetch_rows(scratch + call[c.KEY_LIST] + 8 * first, count, row_bytes)
            prefetch_rows(scratch + call[c.VALUE_LIST] + 8 * first, count, row_bytes)
            seen = min(num_keys, last_of_lane(call, (column + width) * 16 - 1, scratch) + 1 - kv_pos)
            if seen > 0:
                attend_strip(call, factors, column, width, kv_pos, seen, special, scratch)
