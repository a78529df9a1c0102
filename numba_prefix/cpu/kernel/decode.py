"""The tile loop for few query rows (tiling.fold_rows): keys and values are read once, where they lie, nothing is packed.

Folded layout: with R rows a vector of scores holds 16 / R keys, lane = key * R + row; acc is [R, head_size] float32.
Rows past the last real one repeat it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline, part
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.decode_dot import VALUE_COLUMNS, add_values, score_vector
from numba_prefix.cpu.kernel.paged_kv import item_bytes, list_rows, load_any, load_query, narrow_row
from numba_prefix.cpu.kernel.params import FEW_N
from numba_prefix.cpu.kernel.prefill_f32_gemm import COLUMN_ROW
from numba_prefix.cpu.kernel.row_state import lse_of_column, out_address, partial_address, set_lane, store_lse
from numba_prefix.cpu.kernel.scores import gather_entries, score_column, weigh_column
from numba_prefix.cpu.simd.memory import (
    any_lane,
    fma,
    fold_lanes,
    is_not_finite,
    load1_f32,
    load1_i32,
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
from numba_prefix.rules.elementwise import where
from numba_prefix.rules.softmax import normalize, rescale, running_max, shift_of

WIDTH_1, WIDTH_4, WIDTH_8 = (16 * VALUE_COLUMNS[rows] for rows in (1, 4, 8))
ZERO = np.float32(0.0)
NEG_INF = np.float32(-np.inf)


@inline
def fold_max(lanes: Any, fold_rows: Any) -> Any:
    """The max over the lanes of each row, in all of them."""
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


@part
def start_few(
    call: Any, factors: Any, sequence: Any, runs: Any, rows: Any, fold_rows: Any, kv_head: Any, scratch: Any
) -> None:
    """Query rows [R, head_size] as float32 at Q_T, what the rules need in all 16 lanes, and an empty state."""
    head_size, pitch = call[c.HEAD_SIZE], call[c.PITCH]
    for lane in range(16):
        row = lane & (fold_rows - 1)
        source = set_lane(call, sequence, runs, min(row, rows - 1), kv_head, lane, scratch)
        store1_i32(scratch + call[c.KV_LANE] + 4 * lane, np.int32(lane // fold_rows))
        if lane < fold_rows:
            load_query(call, factors, source, scratch + call[c.Q_T] + row * pitch)
            for i in range(0, head_size, 16):
                store_f32(scratch + call[c.ACC] + row * pitch + 4 * i, splat_f32(ZERO))
    store_f32(scratch + call[c.STATE], splat_f32(NEG_INF))
    store_f32(scratch + call[c.STATE] + COLUMN_ROW, splat_f32(ZERO))


@part
def score_few(
    call: Any,
    factors: Any,
    fold_rows: Any,
    is_edge: Any,
    kv_pos: Any,
    num_keys: Any,
    keys: Any,
    scratch: Any,
) -> None:
    """Products, rule chain and weights of num_keys keys; leaves alpha. Asks for the values that come next: rows of one head
    are too far apart for the hardware to see them coming."""
    s, values = scratch + call[c.S], scratch + call[c.VALUE_LIST]
    step = 16 // fold_rows
    num_vectors = tiling.ceil_div(num_keys, step)
    code, depth = variant(call, fold_rows), call[c.HEAD_SIZE] >> 4
    for i in range(num_vectors):
        at = 8 * i * step
        score_vector(code, keys + at, values + at, scratch + call[c.Q_T], call[c.PITCH], depth, s + i * COLUMN_ROW)
    origin, last = load_i32(scratch + call[c.ORIGIN]), load_i32(scratch + call[c.LAST])
    # The lanes of a vector that is not full are keys past the block: of the same sequence, where its keys are not all held.
    block_end = splat_i32(kv_pos + num_keys - 1)
    last = where(last < block_end, last, block_end)
    slope, kv_lane = load_f32(scratch + call[c.ROW_SLOPES]), load_i32(scratch + call[c.KV_LANE])
    entries = scratch + call[c.ENTRIES]
    if call[c.BIAS] >= c.TEMPLATE_LINEAR:
        base = load_i64(scratch + call[c.MASK_BASE])
        q_pos = load_i32(scratch + call[c.Q_POS])
        gather_entries(call, base, q_pos, kv_pos, kv_lane, step, num_vectors, entries, entries)
    m_old = load_f32(scratch + call[c.STATE])
    is_partial = num_vectors * step != num_keys
    m_i = score_column(
        call, is_edge or is_partial, s, entries, num_vectors, kv_pos, step, kv_lane, factors[c.QK_SCALE], slope, origin, last,
        m_old,
    )  # fmt: skip
    m_i = fold_max(m_i, fold_rows)
    shift = shift_of(m_i)
    unit_log2 = factors[c.UNIT_LOG2]
    alpha = rescale(m_old, shift, unit_log2)
    l_i = fma(load_f32(scratch + call[c.STATE] + COLUMN_ROW), alpha, weigh_column(s, num_vectors, shift, unit_log2))
    store_f32(scratch + call[c.STATE], m_i)
    store_f32(scratch + call[c.STATE] + COLUMN_ROW, l_i)
    store_f32(scratch + call[c.ALPHA], alpha)


@inline
def variant(call: Any, fold_rows: Any) -> Any:
    """cpu/kernel/decode_dot.py's number of the micro-kernel for these rows and this dtype."""
    return (0 if fold_rows == 1 else 3 if fold_rows == 4 else 6) + call[c.DTYPE]


@part
def output_few(call: Any, fold_rows: Any, num_keys: Any, next_keys: Any, scratch: Any) -> None:
    """Asks for the keys of the next block meanwhile."""
    head_size, item = call[c.HEAD_SIZE], item_bytes(call[c.DTYPE])
    width = WIDTH_1 if fold_rows == 1 else WIDTH_4 if fold_rows == 4 else WIDTH_8
    code = variant(call, fold_rows)
    wide = head_size // width * width
    for i in range(0, wide, width):
        add_values(
            code, scratch + call[c.VALUE_LIST], next_keys, i * item, scratch + call[c.S], num_keys,
            scratch + call[c.ACC] + 4 * i, call[c.PITCH], scratch + call[c.ALPHA], True,
        )  # fmt: skip
    for i in range(wide, head_size, 16):
        add_values(
            code, scratch + call[c.VALUE_LIST], next_keys, i * item, scratch + call[c.S], num_keys,
            scratch + call[c.ACC] + 4 * i, call[c.PITCH], scratch + call[c.ALPHA], False,
        )  # fmt: skip


@part
def has_special_few(call: Any, num_keys: Any, scratch: Any) -> Any:
    item = item_bytes(call[c.DTYPE])
    for j in range(num_keys):
        source = load1_i64(scratch + call[c.VALUE_LIST] + 8 * j)
        for i in range(0, call[c.HEAD_SIZE], 16):
            if any_lane(is_not_finite(load_any(call[c.DTYPE], source + i * item))):
                return True
    return False


@part
def careful_few(call: Any, fold_rows: Any, kv_pos: Any, num_keys: Any, scratch: Any) -> None:
    """As output_few where values are not finite: a weight of zero must not meet them. The same sums, the same bits."""
    item = item_bytes(call[c.DTYPE])
    for row in range(fold_rows):
        last = np.int64(load1_i32(scratch + call[c.LAST] + 4 * row))
        alpha = splat_f32(load1_f32(scratch + call[c.ALPHA] + 4 * row))
        for i in range(0, call[c.HEAD_SIZE], 16):
            total = splat_f32(ZERO)
            for j in range(min(num_keys, last + 1 - kv_pos)):
                value = load_any(call[c.DTYPE], load1_i64(scratch + call[c.VALUE_LIST] + 8 * j) + i * item)
                weight = splat_f32(load1_f32(scratch + call[c.S] + 4 * (j * fold_rows + row)))
                total = fma(value, weight, total)
            acc = scratch + call[c.ACC] + row * call[c.PITCH] + 4 * i
            store_f32(acc, fma(alpha, load_f32(acc), total))


@part
def attend_few(
    call: Any,
    factors: Any,
    entry: Any,
    sequence: Any,
    runs: Any,
    fold_rows: Any,
    table: Any,
    k: Any,
    v: Any,
    scratch: Any,
) -> None:
    """All keys of one work item, a block of them for each of its heads in turn: k and v are the first head's. Key rows are
    listed a turn ahead, so that they can be asked for in time."""
    kv_idx, n_end, head = entry[tiling.N_BEGIN], entry[tiling.N_END], 0
    run = tiling.run_of_key(runs, sequence, kv_idx)
    kv_pos = tiling.kv_pos_of_key(runs, run, kv_idx)
    num_keys = tiling.keys_in_block(runs, run, kv_idx, n_end, FEW_N)
    keys = scratch + call[c.KEY_LIST]
    next_keys = keys + 8 * FEW_N
    list_rows(call, k, call[c.K_BLOCK], call[c.K_SLOT], table, kv_pos, num_keys, FEW_N, keys)
    while kv_idx < n_end:
        own = scratch + head * call[c.HEAD_BYTES]
        values, v_head = own + call[c.VALUE_LIST], v + head * call[c.V_HEAD]
        list_rows(call, v_head, call[c.V_BLOCK], call[c.V_SLOT], table, kv_pos, num_keys, FEW_N, values)
        next_pos, next_count = kv_pos, num_keys
        head += 1
        if head == call[c.ITEM_HEADS]:
            head = 0
            kv_idx += num_keys
            run = tiling.run_of_key(runs, sequence, kv_idx)
            next_pos = tiling.kv_pos_of_key(runs, run, kv_idx)
            next_count = tiling.keys_in_block(runs, run, kv_idx, n_end, FEW_N)
        k_head = k + head * call[c.K_HEAD]
        list_rows(call, k_head, call[c.K_BLOCK], call[c.K_SLOT], table, next_pos, next_count, FEW_N, next_keys)
        is_edge = np.int64(load1_i32(own + call[c.LAST])) < kv_pos + num_keys - 1
        score_few(call, factors, fold_rows, is_edge, kv_pos, num_keys, keys, own)
        if is_edge and has_special_few(call, num_keys, own):
            careful_few(call, fold_rows, kv_pos, num_keys, own)
        else:
            output_few(call, fold_rows, num_keys, next_keys, own)
        keys, next_keys = next_keys, keys
        kv_pos, num_keys = next_pos, next_count


@part
def store_partial_few(call: Any, place: Any, fold_rows: Any, scratch: Any) -> None:
    """m_i, l_i, acc."""
    store_f32(place, load_f32(scratch + call[c.STATE]))
    store_f32(place + COLUMN_ROW, load_f32(scratch + call[c.STATE] + COLUMN_ROW))
    for row in range(fold_rows):
        target = place + 2 * COLUMN_ROW + 4 * row * call[c.HEAD_SIZE]
        for i in range(0, call[c.HEAD_SIZE], 16):
            store_f32(target + 4 * i, load_f32(scratch + call[c.ACC] + row * call[c.PITCH] + 4 * i))


@part
def merge_partials_few(
    call: Any, factors: Any, entry: Any, kv_head: Any, rows: Any, fold_rows: Any, scratch: Any
) -> None:
    """The states of all splits, in order of their keys whoever came last."""
    num_splits = entry[tiling.NUM_SPLITS]
    m_i = splat_f32(NEG_INF)
    for split_idx in range(num_splits):
        m_i = running_max(m_i, load_f32(partial_address(call, entry, split_idx, kv_head, rows)))
    shift = shift_of(m_i)
    l_i = splat_f32(ZERO)
    for split_idx in range(num_splits):
        place = partial_address(call, entry, split_idx, kv_head, rows)
        alpha = rescale(load_f32(place), shift, factors[c.UNIT_LOG2])
        store_f32(scratch + call[c.ALPHA], alpha)
        l_i = fma(load_f32(place + COLUMN_ROW), alpha, l_i)
        for row in range(fold_rows):
            factor = splat_f32(load1_f32(scratch + call[c.ALPHA] + 4 * row))
            source = place + 2 * COLUMN_ROW + 4 * row * call[c.HEAD_SIZE]
            for i in range(0, call[c.HEAD_SIZE], 16):
                acc = scratch + call[c.ACC] + row * call[c.PITCH] + 4 * i
                total = load_f32(acc) if split_idx > 0 else splat_f32(ZERO)
                store_f32(acc, fma(load_f32(source + 4 * i), factor, total))
    store_f32(scratch + call[c.STATE], m_i)
    store_f32(scratch + call[c.STATE] + COLUMN_ROW, l_i)


@part
def store_output_few(
    call: Any, factors: Any, sequence: Any, rows: Any, fold_rows: Any, kv_head: Any, scratch: Any
) -> None:
    l_i = fold_sum(load_f32(scratch + call[c.STATE] + COLUMN_ROW), fold_rows)
    sums, log_sums = scratch + call[c.STATE] + COLUMN_ROW, scratch + call[c.ALPHA]
    store_f32(sums, l_i)
    store_f32(log_sums, lse_of_column(call, factors, 0, load_f32(scratch + call[c.STATE]), l_i, scratch))
    for row in range(rows):
        acc = scratch + call[c.ACC] + row * call[c.PITCH]
        divisor = splat_f32(load1_f32(sums + 4 * row))
        for i in range(0, call[c.HEAD_SIZE], 16):
            store_f32(acc + 4 * i, normalize(load_f32(acc + 4 * i), divisor))
        narrow_row(call[c.OUT_DTYPE], acc, out_address(call, sequence, row, kv_head), call[c.HEAD_SIZE])
        store_lse(call, sequence, row, kv_head, load1_f32(log_sums + 4 * row))
