"""Merging what the splits of a tile left behind: one work item = a split tile of one kv head, a warp for each row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, float32

from numba_prefix.cuda.kernel import ptx, rules
from numba_prefix.cuda.kernel import spec as c
from numba_prefix.cuda.kernel.common import (
    STORES,
    origin_of,
    partial_address,
    partial_pitch,
    store_lse,
    token_and_head,
    work_of,
)
from numba_prefix.inputs.arrays import ITEM_BYTES
from numba_prefix.rules.elementwise import F32_NEG_INF
from numba_prefix.rules.tiling import KV_LEN, M_BLOCK, NUM_SPLITS, PARTIAL_OFFSET, Q_BEGIN, Q_LEN

WARPS = 4
THREADS = 32 * WARPS
ZERO = np.float32(0.0)


def make(spec: c.KernelSpec) -> c.Source:
    LANE_DIMS = spec.head_dim // 32
    store, OUT_BYTES = STORES[spec.out_dtype], ITEM_BYTES[spec.out_dtype]

    def kernel(call: Any, factors: Any) -> None:
        acc = cuda.local.array(LANE_DIMS, float32)
        lane, warp = np.int32(cuda.threadIdx.x & 31), np.int32(cuda.threadIdx.x >> 5)
        entry, kv_head, sequence, runs = work_of(call, call[c.MERGE])
        rows = rules.rows_in_tile(sequence[Q_LEN], call[c.GROUP_SIZE], entry[M_BLOCK], call[c.TILE_ROWS])
        pitch, lanes = partial_pitch(call), rules.lane_rows(rows)
        for row in range(warp, rows, WARPS):
            m_i, l_i = F32_NEG_INF, ZERO
            for i in range(LANE_DIMS):
                acc[i] = ZERO
            for split_idx in range(entry[NUM_SPLITS]):
                state = partial_address(call, entry[PARTIAL_OFFSET], split_idx, kv_head, rows)
                m_i = rules.running_max(m_i, ptx.load_f32(state + 4 * (lanes * pitch + row)))
            shift = rules.shift_of(m_i)
            for split_idx in range(entry[NUM_SPLITS]):
                state = partial_address(call, entry[PARTIAL_OFFSET], split_idx, kv_head, rows)
                m_of_split = ptx.load_f32(state + 4 * (lanes * pitch + row))
                alpha = rules.rescale(m_of_split, shift, factors[c.UNIT_LOG2])
                l_i = l_i + alpha * ptx.load_f32(state + 4 * (lanes * pitch + lanes + row))
                for i in range(LANE_DIMS):
                    column = 32 * i + lane
                    if column < call[c.HEAD_SIZE]:
                        part = ptx.load_f32(state + 4 * (row * pitch + column))
                        acc[i] = acc[i] + rules.weighted(part, alpha)
            token, q_head = token_and_head(call, sequence[Q_BEGIN], entry[M_BLOCK] * call[c.TILE_ROWS] + row, kv_head)
            out = call[c.OUT] + token * call[c.OUT_TOKEN] + q_head * call[c.OUT_HEAD]
            for i in range(LANE_DIMS):
                column = 32 * i + lane
                if column < call[c.HEAD_SIZE]:
                    store(out + OUT_BYTES * column, rules.normalize(acc[i], l_i))
            if lane == 0:
                q_pos = sequence[KV_LEN] - sequence[Q_LEN] + token - sequence[Q_BEGIN]
                store_lse(call, token, q_head, m_i, l_i, factors[c.UNIT], origin_of(call, runs, sequence, q_pos))

    return c.Source(spec.name, kernel, THREADS, 0, 0, 0)
