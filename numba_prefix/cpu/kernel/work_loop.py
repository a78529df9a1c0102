"""The tile loop of the CPU target: work items are drained from one queue by any number of workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline, kernel, part
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel import prefill_f32
from numba_prefix.cpu.kernel.decode import (
    attend_few,
    merge_partials_few,
    start_few,
    store_output_few,
    store_partial_few,
)
from numba_prefix.cpu.kernel.paged_kv import narrow_row
from numba_prefix.cpu.kernel.prefill_f32_gemm import COLUMN_ROW
from numba_prefix.cpu.kernel.row_state import lse_of_column, out_address, partial_address, store_lse
from numba_prefix.cpu.simd.memory import (
    atomic_add,
    enter_float_mode,
    fma,
    leave_float_mode,
    load1_f32,
    load_f32,
    splat_f32,
    store_f32,
    transpose_block,
)
from numba_prefix.rules import tiling
from numba_prefix.rules.softmax import normalize, rescale, running_max, shift_of
from numba_prefix.rules.tiling import lane_rows, round_up

NEG_INF = np.float32(-np.inf)
ZERO = np.float32(0.0)


@part
def start_state(call: Any, columns: Any, scratch: Any) -> None:
    """m_i = -inf, l_i = 0, acc = 0."""
    for column in range(columns):
        store_f32(scratch + call[c.STATE] + 2 * column * COLUMN_ROW, splat_f32(NEG_INF))
        store_f32(scratch + call[c.STATE] + (2 * column + 1) * COLUMN_ROW, splat_f32(ZERO))
    for i in range(columns * round_up(call[c.HEAD_SIZE], 16)):
        store_f32(scratch + call[c.ACC] + i * COLUMN_ROW, splat_f32(ZERO))


@part
def store_output(call: Any, factors: Any, sequence: Any, first_row: Any, rows: Any, kv_head: Any, scratch: Any) -> None:
    """Normalises acc and writes output rows (and lse if asked for)."""
    pitch = call[c.PITCH]
    depth = round_up(call[c.HEAD_SIZE], 16)
    row_buffer, log_sums = scratch + call[c.ROWS], scratch + call[c.ALPHA]
    for column in range(lane_rows(rows) >> 4):
        state = scratch + call[c.STATE] + 2 * column * COLUMN_ROW
        acc = scratch + call[c.ACC] + column * depth * COLUMN_ROW
        l_i = load_f32(state + COLUMN_ROW)
        store_f32(log_sums, lse_of_column(call, factors, column, load_f32(state), l_i, scratch))
        for i in range(depth):
            store_f32(acc + i * COLUMN_ROW, normalize(load_f32(acc + i * COLUMN_ROW), l_i))
        for i in range(0, depth, 16):
            transpose_block(acc + i * COLUMN_ROW, COLUMN_ROW, row_buffer + 4 * i, pitch)
        for lane in range(min(16, rows - column * 16)):
            row = first_row + column * 16 + lane
            target = out_address(call, sequence, row, kv_head)
            narrow_row(call[c.OUT_DTYPE], row_buffer + lane * pitch, target, call[c.HEAD_SIZE])
            store_lse(call, sequence, row, kv_head, load1_f32(log_sums + 4 * lane))


@part
def store_partial(call: Any, place: Any, columns: Any, scratch: Any) -> None:
    """A split's state, for whoever finishes the tile: for each column m_i, l_i, acc."""
    depth = round_up(call[c.HEAD_SIZE], 16)
    for column in range(columns):
        state = scratch + call[c.STATE] + 2 * column * COLUMN_ROW
        store_f32(place, load_f32(state))
        store_f32(place + COLUMN_ROW, load_f32(state + COLUMN_ROW))
        place += 2 * COLUMN_ROW
        for i in range(depth):
            store_f32(place, load_f32(scratch + call[c.ACC] + (column * depth + i) * COLUMN_ROW))
            place += COLUMN_ROW


@part
def merge_partials(call: Any, factors: Any, entry: Any, kv_head: Any, rows: Any, scratch: Any) -> None:
    """The states of all splits of a tile, in order of their keys whoever came last, as the tile's own state."""
    depth = round_up(call[c.HEAD_SIZE], 16)
    num_splits = entry[tiling.NUM_SPLITS]
    for column in range(lane_rows(rows) >> 4):
        start = column * (depth + 2) * COLUMN_ROW
        m_i = splat_f32(NEG_INF)
        for split_idx in range(num_splits):
            m_i = running_max(m_i, load_f32(partial_address(call, entry, split_idx, kv_head, rows) + start))
        shift = shift_of(m_i)
        acc = scratch + call[c.ACC] + column * depth * COLUMN_ROW
        l_i = splat_f32(ZERO)
        for split_idx in range(num_splits):
            place = partial_address(call, entry, split_idx, kv_head, rows) + start
            alpha = rescale(load_f32(place), shift, factors[c.UNIT_LOG2])
            l_i = l_i + load_f32(place + COLUMN_ROW) * alpha
            for i in range(depth):
                total = load_f32(acc + i * COLUMN_ROW) if split_idx > 0 else splat_f32(ZERO)
                store_f32(acc + i * COLUMN_ROW, fma(load_f32(place + (2 + i) * COLUMN_ROW), alpha, total))
        store_f32(scratch + call[c.STATE] + 2 * column * COLUMN_ROW, m_i)
        store_f32(scratch + call[c.STATE] + (2 * column + 1) * COLUMN_ROW, l_i)


@part
def finish_split(call: Any, factors: Any, entry: Any, rows: Any, fold_rows: Any, kv_head: Any, scratch: Any) -> Any:
    """Leaves a split's state for the others; whether this was the last of its tile, whose scratch then has them all."""
    place = partial_address(call, entry, entry[tiling.SPLIT_IDX], kv_head, rows)
    if fold_rows > 0:
        store_partial_few(call, place, fold_rows, scratch)
    else:
        store_partial(call, place, lane_rows(rows) >> 4, scratch)
    arrival = call[c.ARRIVALS] + 8 * (entry[tiling.SPLIT_TILE] * call[c.KV_HEAD_NUM] + kv_head)
    if atomic_add(arrival, 1) < entry[tiling.NUM_SPLITS] - 1:
        return False
    if fold_rows > 0:
        merge_partials_few(call, factors, entry, kv_head, rows, fold_rows, scratch)
    else:
        merge_partials(call, factors, entry, kv_head, rows, scratch)
    return True


@part
def finish(
    call: Any,
    factors: Any,
    entry: Any,
    sequence: Any,
    first_row: Any,
    rows: Any,
    fold_rows: Any,
    kv_head: Any,
    scratch: Any,
) -> None:
    """The state of one head's tile, or split of it, to output rows or to where the last of its splits finds it."""
    if entry[tiling.NUM_SPLITS] > 1 and not finish_split(call, factors, entry, rows, fold_rows, kv_head, scratch):
        return
    if fold_rows > 0:
        store_output_few(call, factors, sequence, rows, fold_rows, kv_head, scratch)
    else:
        store_output(call, factors, sequence, first_row, rows, kv_head, scratch)


@inline
def nothing() -> None: ...


def make_drain(
    name: str, load_queries: Any, attend_keys: Any, enter_unit: Any = nothing, leave_unit: Any = nothing
) -> Any:
    """The kernel of an instruction-set path.

    load_queries: lays out a tile's query rows. attend_keys: adds the keys of a work item to its state. enter_unit, leave_unit:
    what a thread has to do before and after.
    """

    def drain(call: Any, factors: Any, sequences: Any, runs: Any, work: Any, worker: Any, max_items: Any) -> Any:
        """One work item = (tile, split, ITEM_HEADS kv heads: one, unless all rows are few). Takes items from the queue until it
        is empty or max_items are done; returns whether items were left.

        call       int64 [CALL_LENGTH]
        factors    float32 [FACTORS_LENGTH]
        sequences  int64 [batch, SEQUENCE_COLUMNS]
        runs       int64 [runs, RUN_COLUMNS]
        work       int64 [entries, WORK_COLUMNS]
        """
        scratch = call[c.SCRATCH] + worker * call[c.SCRATCH_BYTES]
        item_heads, group_size = call[c.ITEM_HEADS], call[c.GROUP_SIZE]
        head_groups = call[c.KV_HEAD_NUM] // item_heads
        float_mode = enter_float_mode()
        enter_unit()
        is_left = True
        for _ in range(max_items):
            item = atomic_add(call[c.QUEUE], 1)
            if item >= call[c.NUM_ITEMS]:
                is_left = False
                break
            entry, kv_head = work[item // head_groups], item % head_groups * item_heads
            sequence = sequences[entry[tiling.SEQUENCE]]
            q_len, m_block = sequence[tiling.Q_LEN], entry[tiling.M_BLOCK]
            first_row = m_block * sequence[tiling.TILE_ROWS]
            rows = tiling.rows_in_tile(q_len, group_size, m_block, sequence[tiling.TILE_ROWS])
            fold_rows = tiling.fold_rows(q_len, group_size, call[c.HEAD_SIZE])
            table = call[c.TABLES] + entry[tiling.SEQUENCE] * call[c.TABLE_ROW]
            k, v = call[c.K] + kv_head * call[c.K_HEAD], call[c.V] + kv_head * call[c.V_HEAD]
            if fold_rows > 0:
                for head in range(item_heads):
                    own = scratch + head * call[c.HEAD_BYTES]
                    start_few(call, factors, sequence, runs, rows, fold_rows, kv_head + head, own)
                attend_few(call, factors, entry, sequence, runs, fold_rows, table, k, v, scratch)
            else:
                load_queries(call, factors, sequence, runs, first_row, rows, kv_head, scratch)
                start_state(call, lane_rows(rows) >> 4, scratch)
                attend_keys(call, factors, entry, sequence, runs, table, lane_rows(rows) >> 4, k, v, scratch)
            for head in range(item_heads):
                own = scratch + head * call[c.HEAD_BYTES]
                finish(call, factors, entry, sequence, first_row, rows, fold_rows, kv_head + head, own)
        leave_unit()
        leave_float_mode(float_mode)
        return is_left

    drain.__name__ = drain.__qualname__ = name
    return kernel(drain)


drain = make_drain("drain", prefill_f32.load_queries, prefill_f32.attend_keys)
