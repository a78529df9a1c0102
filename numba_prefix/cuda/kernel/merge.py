"""Merges the states that the splits of a tile left: one work item = a split tile of one kv head,
with a warp for each row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, float32

from numba_prefix.cuda.kernel import ptx
from numba_prefix.cuda.kernel.common import (
    STORES,
    bias_pos_of,
    partial_address,
    partial_pitch,
    q_pos_of,
    store_lse,
    token_and_head,
    work_of,
)
from numba_prefix.cuda.kernel.rules import softmax, tiling
from numba_prefix.cuda.kernel.spec import KernelSpec, Source
from numba_prefix.inputs.arrays import ITEM_BYTES
from numba_prefix.rules.elementwise import F32_NEG_INF
from numba_prefix.rules.tiling import M_BLOCK, NUM_SPLITS, PARTIAL_OFFSET, Q_BEGIN, Q_LEN

WARPS = 4
THREADS = 32 * WARPS
ZERO = np.float32(0.0)


def make(spec: KernelSpec) -> Source:
    LANE_DIMS = spec.head_dim // 32
    store, OUT_BYTES = STORES[spec.out_dtype], ITEM_BYTES[spec.out_dtype]

    def kernel(params: Any) -> None:
        acc = cuda.local.array(LANE_DIMS, float32)
        lane, warp = np.int32(cuda.threadIdx.x & 31), np.int32(cuda.threadIdx.x >> 5)
        work_item, kv_head, sequence, runs = work_of(params, params.merge_ptr)
        rows = tiling.rows_in_tile(sequence[Q_LEN], params.group_size, work_item[M_BLOCK], params.tile_rows)
        pitch, lanes = partial_pitch(params), tiling.lane_rows(rows)
        for row in range(warp, rows, WARPS):
            m_i, l_i = F32_NEG_INF, ZERO
            for i in range(LANE_DIMS):
                acc[i] = ZERO
            for split_idx in range(work_item[NUM_SPLITS]):
                state = partial_address(params, work_item[PARTIAL_OFFSET], split_idx, kv_head, rows)
                m_i = softmax.running_max(m_i, ptx.load_f32(state + 4 * (lanes * pitch + row)))
            shift = softmax.shift_of(m_i)
            for split_idx in range(work_item[NUM_SPLITS]):
                state = partial_address(params, work_item[PARTIAL_OFFSET], split_idx, kv_head, rows)
                m_of_split = ptx.load_f32(state + 4 * (lanes * pitch + row))
                alpha = softmax.rescale(m_of_split, shift, params.unit_log2)
                l_i = l_i + alpha * ptx.load_f32(state + 4 * (lanes * pitch + lanes + row))
                for i in range(LANE_DIMS):
                    column = 32 * i + lane
                    if column < params.head_size:
                        part = ptx.load_f32(state + 4 * (row * pitch + column))
                        acc[i] = softmax.add_part(acc[i], part, alpha)
            tile_row = work_item[M_BLOCK] * params.tile_rows + row
            token, q_head = token_and_head(params, sequence[Q_BEGIN], tile_row, kv_head)
            out = params.out_ptr + token * params.out_token_stride + q_head * params.out_head_stride
            for i in range(LANE_DIMS):
                column = 32 * i + lane
                if column < params.head_size:
                    store(out + OUT_BYTES * column, softmax.normalize(acc[i], l_i))
            if lane == 0:
                bias_pos = bias_pos_of(params, runs, sequence, q_pos_of(params, sequence, tile_row))
                store_lse(params, token, q_head, m_i, l_i, bias_pos)

    return Source(spec.name, kernel, THREADS, 0, 0, 0)
