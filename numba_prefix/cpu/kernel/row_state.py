"""What both tile loops keep per query row, and where rows and split states lie in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.prefill_f32_gemm import COLUMN_ROW
from numba_prefix.cpu.simd.memory import load1_f32, load_f32, load_i32, store1_f32, store1_i32, store1_i64
from numba_prefix.rules import tiling
from numba_prefix.rules.masks import last_visible, left_align_shift
from numba_prefix.rules.softmax import log_sum_exp
from numba_prefix.rules.tiling import group_idx_of_row, q_idx_of_row

ONE = np.float32(1.0)


@inline
def set_lane(call: Any, sequence: Any, runs: Any, row: Any, kv_head: Any, lane: Any, scratch: Any) -> Any:
    """Writes what the rules need of a row into its lane; returns the address of its query."""
    q_idx = q_idx_of_row(row, call[c.GROUP_SIZE])
    q_head = kv_head * call[c.GROUP_SIZE] + group_idx_of_row(row, call[c.GROUP_SIZE])
    q_pos = sequence[tiling.KV_LEN] - sequence[tiling.Q_LEN] + q_idx
    last = last_visible(call[c.IS_CAUSAL] != 0, q_pos, sequence[tiling.KV_LEN])
    slope = load1_f32(call[c.SLOPES] + 4 * q_head) if call[c.SLOPES] != 0 else ONE
    store1_i32(scratch + call[c.Q_POS] + 4 * lane, np.int32(q_pos))
    origin = tiling.last_held(runs, sequence, q_pos) if call[c.HAS_SHIFT] != 0 else q_pos
    store1_i32(scratch + call[c.ORIGIN] + 4 * lane, np.int32(origin))
    store1_i32(scratch + call[c.LAST] + 4 * lane, np.int32(last))
    store1_f32(scratch + call[c.ROW_SLOPES] + 4 * lane, slope)
    store1_i64(scratch + call[c.MASK_BASE] + 8 * lane, call[c.MASK] + q_head * call[c.MASK_HEAD])
    return call[c.Q] + (sequence[tiling.Q_BEGIN] + q_idx) * call[c.Q_TOKEN] + q_head * call[c.Q_HEAD]


@inline
def out_address(call: Any, sequence: Any, row: Any, kv_head: Any) -> Any:
    q_head = kv_head * call[c.GROUP_SIZE] + group_idx_of_row(row, call[c.GROUP_SIZE])
    token = sequence[tiling.Q_BEGIN] + q_idx_of_row(row, call[c.GROUP_SIZE])
    return call[c.OUT] + token * call[c.OUT_TOKEN] + q_head * call[c.OUT_HEAD]


@inline
def store_lse(call: Any, sequence: Any, row: Any, kv_head: Any, value: Any) -> None:
    if call[c.LSE] != 0:
        q_head = kv_head * call[c.GROUP_SIZE] + group_idx_of_row(row, call[c.GROUP_SIZE])
        token = sequence[tiling.Q_BEGIN] + q_idx_of_row(row, call[c.GROUP_SIZE])
        store1_f32(call[c.LSE] + 4 * (token * call[c.KV_HEAD_NUM] * call[c.GROUP_SIZE] + q_head), value)


@inline
def lse_of_column(call: Any, factors: Any, column: Any, m_i: Any, l_i: Any, scratch: Any) -> Any:
    """Log-sum-exp of a column's lanes, with what left-aligned biases left out."""
    if call[c.HAS_SHIFT] != 0:
        slope = load_f32(scratch + call[c.ROW_SLOPES] + column * COLUMN_ROW)
        m_i = m_i + left_align_shift(slope, load_i32(scratch + call[c.ORIGIN] + column * COLUMN_ROW))
    return log_sum_exp(m_i, l_i, factors[c.UNIT])


@inline
def partial_address(call: Any, entry: Any, split_idx: Any, kv_head: Any, rows: Any) -> Any:
    """Where a split leaves its state."""
    size = tiling.partial_floats(rows, call[c.HEAD_SIZE])
    slot = split_idx * call[c.KV_HEAD_NUM] + kv_head
    return call[c.PARTIALS] + 4 * (entry[tiling.PARTIAL_OFFSET] + slot * size)
