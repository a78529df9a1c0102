"""Attention in float32 multiply-adds, on any GPU and for any dtype: one work item = BLOCK_M rows of
one kv head.

A thread has every 16th row of the tile, every 8th key of a key tile's scores, and four neighbouring
dimensions of every 32 of the output; the 8 threads of a row are neighbours in a warp. Rows in
shared memory are 16 bytes longer than the head, so that the rows that a warp reads at once lie in
different banks. Keys and then values go through the same memory.

"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64

from numba_prefix.cuda.kernel import ptx
from numba_prefix.cuda.kernel.common import (
    LOADS,
    STORES,
    WIDENS,
    bias_of,
    find_page,
    finish_of,
    key_tile,
    keys_seen,
    partial_pitch,
    row_of,
    token_and_head,
    work_of,
)
from numba_prefix.cuda.kernel.jit import inline
from numba_prefix.cuda.kernel.rules import masks, softmax, tiling, where
from numba_prefix.cuda.kernel.spec import CHUNK, KernelSpec, Source
from numba_prefix.inputs.arrays import ITEM_BYTES
from numba_prefix.rules.elementwise import F32_NEG_INF
from numba_prefix.rules.tiling import M_BLOCK, N_BEGIN, N_END, Q_BEGIN, Q_LEN, SEQUENCE

WARPS = 4
THREADS = 32 * WARPS
ROW_THREADS = 8  # of one row
ROW_STEP = THREADS // ROW_THREADS  # between the rows of a thread
F32 = 4
ZERO = np.float32(0.0)
HIDDEN = np.float32(-1.0)  # a probability that no key has: those of keys that a row may not see
# Larger heads take smaller tiles: registers for the output, and the 64 KB of shared memory that
# sm_75 has.
MAX_WIDE_HEAD_DIM = 128


def make(spec: KernelSpec) -> Source:
    HEAD_DIM, HAS_BIAS = spec.head_dim, spec.bias != "none"
    ROWS, KEYS = (4, 4) if HEAD_DIM <= MAX_WIDE_HEAD_DIM else (2, 2)  # of a thread
    BLOCK_M, BLOCK_N = ROWS * ROW_STEP, KEYS * ROW_THREADS
    DIM_GROUPS = HEAD_DIM // 32
    ACC_SIZE, S_SIZE, K_SIZE, W_SIZE = 4 * ROWS * DIM_GROUPS, ROWS * KEYS, 4 * KEYS, 4 * ROWS
    PITCH, P_PITCH = F32 * (HEAD_DIM + 4), F32 * (BLOCK_N + 4)
    Q_TILE, KV_TILE = 0, BLOCK_M * PITCH
    P_TILE = KV_TILE + BLOCK_N * PITCH
    ITEM, KEYS_PER_WARP = ITEM_BYTES[spec.dtype], BLOCK_N // WARPS
    CHUNKS, CHUNK_ITEMS = HEAD_DIM * ITEM // CHUNK, CHUNK // ITEM
    IS_ALIGNED, IS_F32 = spec.is_aligned, spec.dtype == "float32"
    load = LOADS[spec.dtype]
    widen: Any = WIDENS.get(spec.dtype)
    bias = bias_of(spec)
    store, OUT_BYTES = STORES[spec.out_dtype], ITEM_BYTES[spec.out_dtype]

    @inline
    def load_chunk(to: Any, address: Any, item: Any, head_size: Any, sign: Any) -> None:
        """16 bytes of a row, from its number `item` on, as float32 into shared memory; zeros past
        the head."""
        x = cuda.local.array(CHUNK_ITEMS, float32)
        for i in range(CHUNK_ITEMS):
            x[i] = ZERO
        if IS_ALIGNED:
            if item < head_size:
                if IS_F32:
                    x[0], x[1], x[2], x[3] = ptx.load4_f32(address + ITEM * item)
                else:
                    words = ptx.load4_i32(address + ITEM * item)
                    for i in range(CHUNK_ITEMS):
                        x[i] = widen(ptx.u16_of_i32(np.int32(words[i // 2] >> (16 * (i % 2)))))
        else:
            for i in range(CHUNK_ITEMS):
                if item + i < head_size:
                    x[i] = load(address + ITEM * (item + i))
        for i in range(0, CHUNK_ITEMS, 4):
            ptx.store_shared4_f32(
                np.int32(to + F32 * i), x[i] * sign, x[i + 1] * sign, x[i + 2] * sign, x[i + 3] * sign
            )

    @inline
    def load_tile(tile: Any, address: Any, block: Any, slot_bytes: Any, page: Any, slot: Any, head_size: Any) -> None:
        """This warp's rows of a key or value tile: lane i knows the physical block
        and slot of row i."""
        lane, warp = np.int32(cuda.threadIdx.x & 31), np.int32(cuda.threadIdx.x >> 5)
        for i in range(KEYS_PER_WARP * CHUNKS // 32):
            row = np.int32(np.uint32(i * 32 + lane) // np.uint32(CHUNKS))
            item = (i * 32 + lane - row * CHUNKS) * CHUNK_ITEMS
            row_page, row_slot = ptx.from_lane_i32(page, row), ptx.from_lane_i32(slot, row)
            source = address + np.int64(row_page) * block + np.int64(row_slot) * slot_bytes
            size = where(row_page >= 0, head_size, np.int64(0))
            to = np.int32(tile + (warp * KEYS_PER_WARP + row) * PITCH + F32 * item)
            load_chunk(to, source, np.int64(item), size, np.float32(1.0))

    @inline
    def load_queries(params: Any, tile: Any, q_begin: Any, first_row: Any, rows: Any, kv_head: Any, sign: Any) -> None:
        """The query tile, times qk_scale's sign; zeros for rows that are none."""
        for i in range(BLOCK_M * CHUNKS // THREADS):
            place_idx = np.int32(i * THREADS + cuda.threadIdx.x)
            row = np.int32(np.uint32(place_idx) // np.uint32(CHUNKS))
            item = (place_idx - row * CHUNKS) * CHUNK_ITEMS
            token, q_head = token_and_head(params, q_begin, first_row + row, kv_head)
            address = params.q_ptr + token * params.q_token_stride + q_head * params.q_head_stride
            size = where(row < rows, params.head_size, np.int64(0))
            load_chunk(np.int32(tile + row * PITCH + F32 * item), address, np.int64(item), size, sign)

    @inline
    def scores(s: Any, base: Any) -> None:
        """s [ROWS, KEYS] = queries · keys of this thread's rows and keys."""
        row, key = np.int32(cuda.threadIdx.x >> 3), np.int32(cuda.threadIdx.x & 7)
        for e in range(S_SIZE):
            s[e] = ZERO
        for d in range(0, HEAD_DIM, 4):
            k = cuda.local.array(K_SIZE, float32)
            for j in range(KEYS):
                at = np.int32(base + KV_TILE + (key + ROW_THREADS * j) * PITCH + F32 * d)
                k[4 * j], k[4 * j + 1], k[4 * j + 2], k[4 * j + 3] = ptx.load_shared4_f32(at)
            for i in range(ROWS):
                q = ptx.load_shared4_f32(np.int32(base + Q_TILE + (row + ROW_STEP * i) * PITCH + F32 * d))
                for j in range(KEYS):
                    total = s[KEYS * i + j]
                    for e in range(4):
                        total = total + q[e] * k[4 * j + e]
                    s[KEYS * i + j] = total

    @inline
    def update(s: Any, acc: Any, m_i: Any, l_i: Any, seen: Any, base: Any, unit_log2: Any, i: Any) -> None:
        """The running softmax of the thread's row i: scores s become probabilities in shared
        memory, and sums are rescaled."""
        top = m_i[i]
        for j in range(KEYS):
            top = softmax.running_max(top, s[KEYS * i + j])
        for step in range(3):
            top = softmax.running_max(top, ptx.butterfly_f32(top, np.int32(1 << step)))
        shift = softmax.shift_of(top)
        alpha = softmax.rescale(m_i[i], shift, unit_log2)
        total = l_i[i] * alpha
        row = (cuda.threadIdx.x >> 3) + ROW_STEP * i
        for j in range(KEYS):
            weight = softmax.exp_score(s[KEYS * i + j], shift, unit_log2)
            total = total + weight
            is_seen = seen[i] & (1 << j) != 0
            key = (cuda.threadIdx.x & 7) + ROW_THREADS * j
            ptx.store_shared_f32(np.int32(base + P_TILE + row * P_PITCH + F32 * key), where(is_seen, weight, HIDDEN))
        m_i[i], l_i[i] = top, total
        for e in range(4 * DIM_GROUPS):
            acc[4 * DIM_GROUPS * i + e] = acc[4 * DIM_GROUPS * i + e] * alpha

    @inline
    def add_value(acc: Any, w: Any, base: Any, key: Any, k: Any) -> None:
        """One key's value, of probabilities w [ROWS, 4] those of column k."""
        quad = np.int32(cuda.threadIdx.x & 7)
        for g in range(DIM_GROUPS):
            v = ptx.load_shared4_f32(np.int32(base + KV_TILE + key * PITCH + 16 * quad + 128 * g))
            for i in range(ROWS):
                is_hidden = w[4 * i + k] < ZERO
                for e in range(4):
                    d = 4 * (DIM_GROUPS * i + g) + e
                    acc[d] = where(is_hidden, acc[d], acc[d] + w[4 * i + k] * v[e])

    @inline
    def add_values(acc: Any, base: Any) -> None:
        """acc [ROWS, DIM_GROUPS, 4] += probabilities · values; a hidden key's value takes no part,
        be it NaN."""
        row = np.int32(cuda.threadIdx.x >> 3)
        for j in range(0, BLOCK_N, 4):
            w = cuda.local.array(W_SIZE, float32)
            for i in range(ROWS):
                at = np.int32(base + P_TILE + (row + ROW_STEP * i) * P_PITCH + F32 * j)
                w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3] = ptx.load_shared4_f32(at)
            add_value(acc, w, base, j, 0)
            add_value(acc, w, base, j + 1, 1)
            add_value(acc, w, base, j + 2, 2)
            add_value(acc, w, base, j + 3, 3)

    @inline
    def store_state(params: Any, acc: Any, address: Any, rows: Any, row: Any, i: Any) -> None:
        pitch, quad = partial_pitch(params), cuda.threadIdx.x & 7
        for g in range(DIM_GROUPS):
            for e in range(4):
                column = 32 * g + 4 * quad + e
                if column < pitch:
                    ptx.store_f32(address + 4 * (row * pitch + column), acc[4 * (DIM_GROUPS * i + g) + e])

    @inline
    def store_row(params: Any, acc: Any, address: Any, l_i: Any, i: Any) -> None:
        for g in range(DIM_GROUPS):
            for e in range(4):
                column = 32 * g + 4 * (cuda.threadIdx.x & 7) + e
                if column < params.head_size:
                    store(address + OUT_BYTES * column, softmax.normalize(acc[4 * (DIM_GROUPS * i + g) + e], l_i))

    finish = finish_of(BLOCK_M, 3, store_state, store_row)

    def kernel(params: Any) -> None:
        s = cuda.local.array(S_SIZE, float32)  # scores [ROWS, KEYS]
        acc = cuda.local.array(ACC_SIZE, float32)  # [ROWS, DIM_GROUPS, 4]
        m_i, l_i = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        slope, mask_base = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, int64)
        q_pos, bias_pos = cuda.local.array(ROWS, int32), cuda.local.array(ROWS, int32)
        seen = cuda.local.array(ROWS, int32)  # a bit for each key of the thread that the row sees
        lane, warp, base = np.int32(cuda.threadIdx.x & 31), np.int32(cuda.threadIdx.x >> 5), ptx.shared_base()
        work_item, kv_head, sequence, runs = work_of(params, params.work_ptr)
        b, n_end, q_begin = work_item[SEQUENCE], work_item[N_END], sequence[Q_BEGIN]
        rows = np.int32(tiling.rows_in_tile(sequence[Q_LEN], params.group_size, work_item[M_BLOCK], BLOCK_M))
        first_row, tile_row = work_item[M_BLOCK] * BLOCK_M, cuda.threadIdx.x >> 3
        k_base, v_base = params.k_ptr + kv_head * params.k_head_stride, params.v_ptr + kv_head * params.v_head_stride

        load_queries(params, base + Q_TILE, q_begin, first_row, rows, kv_head, params.q_sign)
        for i in range(ROWS):
            row = first_row + min(tile_row + ROW_STEP * i, rows - 1)
            state = row_of(params, runs, sequence, row, kv_head)
            q_pos[i], bias_pos[i], slope[i], mask_base[i] = state
            m_i[i], l_i[i] = F32_NEG_INF, ZERO
        for i in range(ACC_SIZE):
            acc[i] = ZERO

        kv_idx = work_item[N_BEGIN]
        key = warp * KEYS_PER_WARP + (lane & (KEYS_PER_WARP - 1))
        while kv_idx < n_end:
            kv_pos, num_keys = key_tile(runs, sequence, kv_idx, n_end, BLOCK_N)
            page, slot = find_page(params, b, kv_pos + key, key < num_keys)
            cuda.syncthreads()  # no thread reads the values before
            load_tile(base + KV_TILE, k_base, params.k_block_stride, params.k_slot_stride, page, slot, params.head_size)
            cuda.syncthreads()
            scores(s, base)
            cuda.syncthreads()  # no thread reads the keys any more
            load_tile(base + KV_TILE, v_base, params.v_block_stride, params.v_slot_stride, page, slot, params.head_size)
            first = kv_pos + (cuda.threadIdx.x & 7)
            for i in range(ROWS):
                begin, end = keys_seen(sequence, q_pos[i], kv_pos, num_keys)
                seen[i] = 0
                for j in range(KEYS):
                    score, at = s[KEYS * i + j], np.int32(first + ROW_THREADS * j)
                    if HAS_BIAS:
                        add = bias(params, mask_base[i], slope[i], q_pos[i], bias_pos[i], at)
                        score = score * params.qk_scale + add
                    is_seen = masks.is_visible(at, begin, end)
                    s[KEYS * i + j] = where(is_seen, score, F32_NEG_INF)
                    seen[i] = np.int32(seen[i] | where(is_seen, 1 << j, 0))
            for i in range(ROWS):
                update(s, acc, m_i, l_i, seen, base, params.unit_log2, i)
            cuda.syncthreads()  # probabilities and values are there
            add_values(acc, base)
            kv_idx += num_keys

        finish(params, work_item, q_begin, kv_head, rows, acc, m_i, l_i, bias_pos, tile_row, 0)
        finish(params, work_item, q_begin, kv_head, rows, acc, m_i, l_i, bias_pos, tile_row + ROW_STEP, 1)
        if ROWS == 4:
            finish(params, work_item, q_begin, kv_head, rows, acc, m_i, l_i, bias_pos, tile_row + 2 * ROW_STEP, 2)
            finish(params, work_item, q_begin, kv_head, rows, acc, m_i, l_i, bias_pos, tile_row + 3 * ROW_STEP, 3)

    return Source(spec.name, kernel, THREADS, P_TILE + BLOCK_M * P_PITCH, BLOCK_M, BLOCK_N)
