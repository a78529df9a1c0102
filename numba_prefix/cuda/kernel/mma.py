"""Attention on tensor cores, sm_80 and newer (the scheme of FlashAttention-2): one work item =
BLOCK_M rows of one kv head.

Each of four warps has 16 of the rows. Keys and values come through the block table, BLOCK_N at a
time and copied in the background: values while scores are computed, the next keys while values are
summed. In shared memory, 16-byte chunks of a row are permuted so that no two rows that ldmatrix
reads at once share a bank.

"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64

from numba_prefix.cuda.kernel import ptx
from numba_prefix.cuda.kernel.common import (
    STORES,
    bias_of,
    find_page,
    finish_of,
    key_tile,
    keys_seen,
    partial_pitch,
    q_pos_of,
    row_of,
    token_and_head,
    work_of,
)
from numba_prefix.cuda.kernel.half2 import halves_of
from numba_prefix.cuda.kernel.jit import inline
from numba_prefix.cuda.kernel.rules import masks, softmax, tiling, where
from numba_prefix.cuda.kernel.spec import CHUNK, KernelSpec, Source
from numba_prefix.inputs.arrays import ITEM_BYTES
from numba_prefix.rules.elementwise import F32_NEG_INF
from numba_prefix.rules.tiling import M_BLOCK, N_BEGIN, N_END, Q_BEGIN, Q_LEN, SEQUENCE

WARPS = 4
THREADS = 32 * WARPS
BLOCK_M = 16 * WARPS
ZERO = np.float32(0.0)
# Queries of larger heads are read from shared memory for every key tile: registers are short.
MAX_KEPT_HEAD_DIM = 128
# With a mask that is read, larger heads take fewer keys at once (else 36 to 132 bytes are spilled),
# and still larger ones do not keep queries either (else 12 to 36 bytes on cc 10.0 and 12.0).
MAX_WIDE_WITH_MASK = 32
MAX_KEPT_WITH_MASK = 96


def make(spec: KernelSpec) -> Source:
    HEAD_DIM, HAS_BIAS = spec.head_dim, spec.bias != "none"
    BLOCK_N = 32 if spec.mask_dtype and HEAD_DIM > MAX_WIDE_WITH_MASK else 64
    KEYS_PER_WARP = BLOCK_N // WARPS
    ROW_BYTES, CHUNKS = 2 * HEAD_DIM, HEAD_DIM // 8
    Q_TILE, K_TILE, V_TILE = 0, BLOCK_M * ROW_BYTES, (BLOCK_M + BLOCK_N) * ROW_BYTES
    STEPS, KEY_PAIRS, DIM_PAIRS = HEAD_DIM // 16, BLOCK_N // 16, HEAD_DIM // 16
    # Loops over acc are short, or in halves: long ones LLVM unrolls too late to keep what they
    # index in registers.
    Q_SIZE, ACC_SIZE, S_SIZE, P_SIZE = 4 * STEPS, 8 * DIM_PAIRS, 8 * KEY_PAIRS, 4 * KEY_PAIRS
    LARGEST_KEPT = MAX_KEPT_WITH_MASK if spec.mask_dtype else MAX_KEPT_HEAD_DIM
    KEEPS_Q = HEAD_DIM <= LARGEST_KEPT
    IS_ALIGNED = spec.is_aligned
    SWIZZLE_SHIFT, SWIZZLE_MASK = (0, 7) if HEAD_DIM % 64 == 0 else (1, 3)
    halves = halves_of(spec.dtype)
    mma, pack, signed = halves.mma, halves.pack, halves.signed
    nonfinite, finite, rest = halves.nonfinite, halves.finite, halves.rest
    bias = bias_of(spec)
    store, OUT_BYTES = STORES[spec.out_dtype], ITEM_BYTES[spec.out_dtype]

    @inline
    def place(row: Any, chunk: Any) -> Any:
        """Byte offset of a chunk in a tile."""
        return np.int32(row * ROW_BYTES + ((chunk ^ ((row >> SWIZZLE_SHIFT) & SWIZZLE_MASK)) << 4))

    @inline
    def load_chunk(address: Any, column: Any, head_bytes: Any) -> Any:
        """Eight numbers of a row from byte `column` on; zeros past the head."""
        pairs = cuda.local.array(4, int32)
        for i in range(4):
            pairs[i] = 0
        if IS_ALIGNED:
            if column < head_bytes:
                pairs[0], pairs[1], pairs[2], pairs[3] = ptx.load4_i32(address + column)
        else:
            for i in range(8):
                if column + 2 * i < head_bytes:
                    half = ptx.i32_of_u16(ptx.load_u16(address + column + 2 * i))
                    pairs[i // 2] = np.int32(pairs[i // 2] | (half << (16 * (i % 2))))
        return pairs[0], pairs[1], pairs[2], pairs[3]

    @inline
    def copy_tile(tile: Any, address: Any, block: Any, slot_bytes: Any, page: Any, slot: Any, head_bytes: Any) -> None:
        """This warp's rows of a key or value tile: lane i knows the physical block
        and slot of row i."""
        lane, warp = np.int32(cuda.threadIdx.x & 31), np.int32(cuda.threadIdx.x >> 5)
        for i in range(KEYS_PER_WARP * CHUNKS // 32):
            row = np.int32(np.uint32(i * 32 + lane) // np.uint32(CHUNKS))
            chunk = np.int32(i * 32 + lane - row * CHUNKS)
            row_page, row_slot = ptx.from_lane_i32(page, row), ptx.from_lane_i32(slot, row)
            to = np.int32(tile + place(np.int32(warp * KEYS_PER_WARP + row), chunk))
            source, column = address, CHUNK * chunk
            if row_page >= 0:
                source = address + np.int64(row_page) * block + np.int64(row_slot) * slot_bytes
            if IS_ALIGNED:
                is_read = row_page >= 0 and column < head_bytes
                ptx.copy16(to, where(is_read, source + column, address), np.int32(where(is_read, 16, 0)))
            else:
                w0, w1, w2, w3 = load_chunk(source, column, where(row_page >= 0, head_bytes, np.int64(0)))
                ptx.store_shared4_i32(to, w0, w1, w2, w3)
        if IS_ALIGNED:
            ptx.commit()

    @inline
    def load_queries(params: Any, tile: Any, q_begin: Any, first_row: Any, rows: Any, kv_head: Any, sign: Any) -> None:
        """The query tile, times qk_scale's sign; zeros for rows that are none."""
        for i in range(BLOCK_M * CHUNKS // THREADS):
            place_idx = np.int32(i * THREADS + cuda.threadIdx.x)
            row = np.int32(np.uint32(place_idx) // np.uint32(CHUNKS))
            chunk = np.int32(place_idx - row * CHUNKS)
            token, q_head = token_and_head(params, q_begin, first_row + row, kv_head)
            address = params.q_ptr + token * params.q_token_stride + q_head * params.q_head_stride
            head_bytes = where(row < rows, 2 * params.head_size, np.int64(0))
            w0, w1, w2, w3 = load_chunk(address, CHUNK * chunk, head_bytes)
            to = np.int32(tile + place(row, chunk))
            ptx.store_shared4_i32(to, signed(w0, sign), signed(w1, sign), signed(w2, sign), signed(w3, sign))

    @inline
    def query_address(tile: Any, step: Any) -> Any:
        """The place of this lane's matrix row: 16 rows of the warp by 16 dimensions."""
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        return np.int32(tile + place(np.int32(16 * warp + (lane & 15)), np.int32(2 * step + (lane >> 4))))

    @inline
    def scores(s: Any, q: Any, base: Any) -> None:
        """s [16 rows, BLOCK_N keys] = queries · keys."""
        lane = cuda.threadIdx.x & 31
        key, half = np.int32((lane & 7) + ((lane >> 4) << 3)), np.int32((lane >> 3) & 1)
        for i in range(8 * KEY_PAIRS):
            s[i] = ZERO
        for k in range(STEPS):
            if KEEPS_Q:
                a0, a1, a2, a3 = q[4 * k], q[4 * k + 1], q[4 * k + 2], q[4 * k + 3]
            else:
                a0, a1, a2, a3 = ptx.load_matrices(query_address(base + Q_TILE, k))
            for j in range(KEY_PAIRS):
                at = np.int32(base + K_TILE + 16 * j * ROW_BYTES + place(key, np.int32(2 * k + half)))
                b0, b1, b2, b3 = ptx.load_matrices(at)
                e = 8 * j
                s[e], s[e + 1], s[e + 2], s[e + 3] = mma(a0, a1, a2, a3, b0, b1, s[e], s[e + 1], s[e + 2], s[e + 3])
                s[e + 4], s[e + 5], s[e + 6], s[e + 7] = mma(
                    a0, a1, a2, a3, b2, b3, s[e + 4], s[e + 5], s[e + 6], s[e + 7]
                )

    @inline
    def add_biases(
        params: Any, s: Any, qk_scale: Any, mask_base: Any, slope: Any, q_pos: Any, bias_pos: Any, first: Any, j: Any
    ) -> None:
        """Scales the scores of keys 16·j to 16·j + 15 and adds their biases."""
        for pair in range(4):
            i = pair & 1
            for e in range(2):
                at = np.int32(first + 16 * j + 8 * (pair >> 1) + e)
                add = bias(params, mask_base[i], slope[i], q_pos[i], bias_pos[i], at)
                s[8 * j + 2 * pair + e] = s[8 * j + 2 * pair + e] * qk_scale + add

    @inline
    def value_address(base: Any, j: Any, d: Any) -> Any:
        """The place of this lane's matrix row: keys 16·j … by dimensions 16·d …"""
        lane = cuda.threadIdx.x & 31
        row, chunk = np.int32(lane & 15), np.int32(2 * d + (lane >> 4))
        return np.int32(base + V_TILE + 16 * j * ROW_BYTES + place(row, chunk))

    @inline
    def add_values(acc: Any, p: Any, base: Any, j: Any) -> None:
        """acc [16 rows, HEAD_DIM] += probabilities · values of keys 16·j to 16·j + 15."""
        for d in range(DIM_PAIRS):
            b0, b1, b2, b3 = ptx.load_matrices_transposed(value_address(base, j, d))
            e = 8 * d
            acc[e], acc[e + 1], acc[e + 2], acc[e + 3] = mma(
                p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3],
                b0, b1, acc[e], acc[e + 1], acc[e + 2], acc[e + 3],
            )  # fmt: skip
            acc[e + 4], acc[e + 5], acc[e + 6], acc[e + 7] = mma(
                p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3],
                b2, b3, acc[e + 4], acc[e + 5], acc[e + 6], acc[e + 7],
            )  # fmt: skip

    @inline
    def holds_nonfinite(base: Any) -> Any:
        """Whether this thread's share of the value tile has an infinity or a NaN."""
        found = np.int32(0)
        for i in range(BLOCK_N * CHUNKS // THREADS):
            at = np.int32(base + V_TILE + CHUNK * (i * THREADS + cuda.threadIdx.x))
            w0, w1, w2, w3 = ptx.load_shared4_i32(at)
            found = np.int32(found | nonfinite(w0) | nonfinite(w1) | nonfinite(w2) | nonfinite(w3))
        return found

    @inline
    def add_nonfinite(acc: Any, kv_pos: Any, num_keys: Any, begin: Any, end: Any, base: Any, first_chunk: Any) -> None:
        """Infinities and NaNs of half the value tile, first_chunk and after, added to the rows that
        see them."""
        column = 4 * (cuda.threadIdx.x & 3)
        for key in range(num_keys):
            is_seen0 = masks.is_visible(kv_pos + key, begin[0], end[0])
            is_seen1 = masks.is_visible(kv_pos + key, begin[1], end[1])
            for j in range(DIM_PAIRS):
                d = first_chunk + j
                at = np.int32(base + V_TILE + place(np.int32(key), np.int32(d)) + column)
                low, high = rest(ptx.load_shared_i32(at))
                if is_seen0:
                    acc[4 * d], acc[4 * d + 1] = acc[4 * d] + low, acc[4 * d + 1] + high
                if is_seen1:
                    acc[4 * d + 2], acc[4 * d + 3] = acc[4 * d + 2] + low, acc[4 * d + 3] + high

    @inline
    def move_nonfinite(acc: Any, kv_pos: Any, num_keys: Any, begin: Any, end: Any, base: Any) -> None:
        """Takes infinities and NaNs out of the value tile and adds them to the rows that see them,
        and to no other: in the products, a hidden key's probability of 0 takes part."""
        add_nonfinite(acc, kv_pos, num_keys, begin, end, base, 0)
        add_nonfinite(acc, kv_pos, num_keys, begin, end, base, DIM_PAIRS)
        cuda.syncthreads()
        for i in range(BLOCK_N * CHUNKS // THREADS):
            at = np.int32(base + V_TILE + CHUNK * (i * THREADS + cuda.threadIdx.x))
            w0, w1, w2, w3 = ptx.load_shared4_i32(at)
            ptx.store_shared4_i32(at, finite(w0), finite(w1), finite(w2), finite(w3))
        cuda.syncthreads()

    @inline
    def update(s: Any, p: Any, acc: Any, m_i: Any, l_i: Any, unit_log2: Any, i: Any) -> None:
        """The running softmax of the thread's row i: scores s become probabilities p, and sums are
        rescaled."""
        top = m_i[i]
        for j in range(2 * KEY_PAIRS):
            top = softmax.running_max(softmax.running_max(top, s[4 * j + 2 * i]), s[4 * j + 2 * i + 1])
        for step in range(1, 3):
            top = softmax.running_max(top, ptx.butterfly_f32(top, np.int32(step)))
        shift = softmax.shift_of(top)
        alpha = softmax.rescale(m_i[i], shift, unit_log2)
        total = l_i[i] * alpha
        for j in range(2 * KEY_PAIRS):
            w0 = softmax.exp_score(s[4 * j + 2 * i], shift, unit_log2)
            w1 = softmax.exp_score(s[4 * j + 2 * i + 1], shift, unit_log2)
            total = total + (w0 + w1)
            p[2 * j + i] = pack(w0, w1)
        m_i[i], l_i[i] = top, total
        for d in range(2 * DIM_PAIRS):
            acc[4 * d + 2 * i] = acc[4 * d + 2 * i] * alpha
            acc[4 * d + 2 * i + 1] = acc[4 * d + 2 * i + 1] * alpha

    @inline
    def store_state(params: Any, acc: Any, address: Any, rows: Any, row: Any, i: Any) -> None:
        pitch, quad = partial_pitch(params), cuda.threadIdx.x & 3
        for d in range(2 * DIM_PAIRS):
            column = 8 * d + 2 * quad
            if column < pitch:
                ptx.store2_f32(address + 4 * (row * pitch + column), acc[4 * d + 2 * i], acc[4 * d + 2 * i + 1])

    @inline
    def store_half(params: Any, acc: Any, address: Any, l_i: Any, i: Any, begin: Any) -> None:
        """Half of the thread's row i: chunks `begin` and after."""
        quad = cuda.threadIdx.x & 3
        for j in range(DIM_PAIRS):
            d = begin + j
            for e in range(2):
                column = 8 * d + 2 * quad + e
                if column < params.head_size:
                    store(address + OUT_BYTES * column, softmax.normalize(acc[4 * d + 2 * i + e], l_i))

    @inline
    def store_row(params: Any, acc: Any, address: Any, l_i: Any, i: Any) -> None:
        store_half(params, acc, address, l_i, i, 0)
        store_half(params, acc, address, l_i, i, DIM_PAIRS)

    finish = finish_of(BLOCK_M, 2, store_state, store_row)

    def kernel(params: Any) -> None:
        # A thread's share of the warp's 16 rows, as mma spreads them: rows lane // 4 and lane // 4
        # + 8
        q = cuda.local.array(Q_SIZE, int32)  # queries [STEPS, 4], pairs of dimensions
        s = cuda.local.array(S_SIZE, float32)  # scores [8 keys, row, 2]
        p = cuda.local.array(P_SIZE, int32)  # probabilities [8 keys, row], pairs of keys
        acc = cuda.local.array(ACC_SIZE, float32)  # [8 dimensions, row, 2]
        m_i, l_i = cuda.local.array(2, float32), cuda.local.array(2, float32)  # [row], as below
        slope, q_pos, bias_pos = cuda.local.array(2, float32), cuda.local.array(2, int32), cuda.local.array(2, int32)
        begin, end, mask_base = cuda.local.array(2, int32), cuda.local.array(2, int32), cuda.local.array(2, int64)
        lane, warp, base = np.int32(cuda.threadIdx.x & 31), np.int32(cuda.threadIdx.x >> 5), ptx.shared_base()
        work_item, kv_head, sequence, runs = work_of(params, params.work_ptr)
        b, n_end = work_item[SEQUENCE], work_item[N_END]
        rows = np.int32(tiling.rows_in_tile(sequence[Q_LEN], params.group_size, work_item[M_BLOCK], BLOCK_M))
        first_row, tile_row = work_item[M_BLOCK] * BLOCK_M, 16 * warp + (lane >> 2)
        q_begin, head_bytes = sequence[Q_BEGIN], 2 * params.head_size
        k_base, v_base = params.k_ptr + kv_head * params.k_head_stride, params.v_ptr + kv_head * params.v_head_stride

        load_queries(params, base + Q_TILE, q_begin, first_row, rows, kv_head, params.q_sign)
        for i in range(2):
            row = first_row + min(tile_row + 8 * i, rows - 1)
            state = row_of(params, runs, sequence, row, kv_head)
            q_pos[i], bias_pos[i], slope[i], mask_base[i] = state
            m_i[i], l_i[i] = F32_NEG_INF, ZERO
        first_pos = q_pos_of(params, sequence, first_row)
        last_pos = q_pos_of(params, sequence, first_row + rows - 1)
        full_begin = np.int32(tiling.visible_begin(sequence, last_pos))
        full_end = np.int32(tiling.visible_end(sequence, first_pos))
        for i in range(8 * DIM_PAIRS):
            acc[i] = ZERO

        kv_idx = work_item[N_BEGIN]
        kv_pos, num_keys = key_tile(runs, sequence, kv_idx, n_end, BLOCK_N)
        key = warp * KEYS_PER_WARP + (lane & (KEYS_PER_WARP - 1))
        page, slot = find_page(params, b, kv_pos + key, key < num_keys)
        copy_tile(base + K_TILE, k_base, params.k_block_stride, params.k_slot_stride, page, slot, head_bytes)
        cuda.syncthreads()
        if KEEPS_Q:
            for k in range(STEPS):
                q[4 * k], q[4 * k + 1], q[4 * k + 2], q[4 * k + 3] = ptx.load_matrices(query_address(base + Q_TILE, k))
        while kv_idx < n_end:
            if IS_ALIGNED:
                ptx.wait_all()
            cuda.syncthreads()  # the keys are there; no thread reads the values before
            copy_tile(base + V_TILE, v_base, params.v_block_stride, params.v_slot_stride, page, slot, head_bytes)
            scores(s, q, base)
            first = np.int32(kv_pos + 2 * (lane & 3))
            if HAS_BIAS:
                add_biases(params, s, params.qk_scale, mask_base, slope, q_pos, bias_pos, first, 0)
                add_biases(params, s, params.qk_scale, mask_base, slope, q_pos, bias_pos, first, 1)
                if KEY_PAIRS == 4:
                    add_biases(params, s, params.qk_scale, mask_base, slope, q_pos, bias_pos, first, 2)
                    add_biases(params, s, params.qk_scale, mask_base, slope, q_pos, bias_pos, first, 3)
            is_edge = tiling.is_edge(full_begin, full_end, kv_pos, num_keys)
            if is_edge or num_keys < BLOCK_N:
                for i in range(2):
                    begin[i], end[i] = keys_seen(sequence, q_pos[i], kv_pos, num_keys)
                for e in range(8 * KEY_PAIRS):
                    at, i = first + 8 * (e >> 2) + (e & 1), (e >> 1) & 1
                    s[e] = where(masks.is_visible(at, begin[i], end[i]), s[e], F32_NEG_INF)
            update(s, p, acc, m_i, l_i, params.unit_log2, 0)
            update(s, p, acc, m_i, l_i, params.unit_log2, 1)
            if IS_ALIGNED:
                ptx.wait_all()
            cuda.syncthreads()  # the values are there; no thread reads the keys any more
            if is_edge and cuda.syncthreads_or(holds_nonfinite(base)) != 0:
                for i in range(2):
                    begin[i], end[i] = keys_seen(sequence, q_pos[i], kv_pos, num_keys)
                move_nonfinite(acc, kv_pos, num_keys, begin, end, base)
            kv_idx += num_keys
            if kv_idx < n_end:
                kv_pos, num_keys = key_tile(runs, sequence, kv_idx, n_end, BLOCK_N)
                page, slot = find_page(params, b, kv_pos + key, key < num_keys)
                copy_tile(base + K_TILE, k_base, params.k_block_stride, params.k_slot_stride, page, slot, head_bytes)
            for j in range(KEY_PAIRS):
                add_values(acc, p, base, j)
        if IS_ALIGNED:
            ptx.wait_all()

        finish(params, work_item, q_begin, kv_head, rows, acc, m_i, l_i, bias_pos, tile_row, 0)
        finish(params, work_item, q_begin, kv_head, rows, acc, m_i, l_i, bias_pos, tile_row + 8, 1)

    shared_bytes = (BLOCK_M + 2 * BLOCK_N) * ROW_BYTES
    return Source(spec.name, kernel, THREADS, shared_bytes, BLOCK_M, BLOCK_N)
