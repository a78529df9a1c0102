"""Path `amx`: the products of pairs of bfloat16 on AMX's tiles, 32 keys or dimensions times 32 rows
at a time.

Tiles 0 to 3 are accumulators [A's upper or lower 16 rows, first or second panel], 4 and 5 hold A, 6
and 7 hold B.
"""

from __future__ import annotations

from typing import Any

from numba_prefix.cpu.compile.jit import device_function, inline
from numba_prefix.cpu.kernel.prefill_bf16 import panel_acc_bytes, panel_q_bytes, plane_bytes
from numba_prefix.cpu.kernel.prefill_bf16_pack import pack_rows
from numba_prefix.cpu.kernel.prefill_bf16_softmax import CREDIT, GROUPS, NEXT_CHUNK, NUM_CHUNKS, exp_chunk
from numba_prefix.cpu.kernel.sizes import BFLOAT, PAIR_DIMS, PANEL_P_BYTES, PANEL_S_BYTES, STEP_N, VECTOR_BYTES
from numba_prefix.cpu.simd.amx_tiles import tile_dot, tile_load, tile_store, tile_zero
from numba_prefix.cpu.simd.bf16_pairs import holds_non_finite, transpose_chunk
from numba_prefix.cpu.simd.memory import load1_i64, load_f32, splat_i32, store1_i64, store_f32
from numba_prefix.rules.tiling import ceil_div, round_up

TILE = 16 * VECTOR_BYTES  # bytes
TILE_ROW = 64


@device_function
def pack_values(params: Any, is_clean: Any, list_ptr: Any, num_keys: Any, scratch_ptr: Any) -> Any:
    """Packs listed value rows as [plane][dimension][key]; returns whether there are infinities or
    NaN, which become 0 if is_clean."""
    depth, pitch = round_up(params.head_size, 16), params.v_pitch
    staged_ptr, staged_list_ptr = scratch_ptr + params.staging_offset, scratch_ptr + params.entries_offset
    spare_ptr = staged_list_ptr + 8 * STEP_N
    # Whole vectors of bfloat16 are transposed from where they lie.
    is_staged = params.planes == 2 or depth > params.head_size or is_clean
    most = splat_i32(0)
    for key in range(0, num_keys, STEP_N):
        if is_staged:
            pack_rows(params, is_clean, list_ptr + 8 * key, STEP_N, staged_ptr, spare_ptr)
        for plane in range(params.planes):
            source_list_ptr = list_ptr + 8 * key
            if is_staged:
                source_list_ptr = staged_list_ptr
                for j in range(STEP_N):
                    row_ptr = staged_ptr + j * params.k_pitch + plane * plane_bytes(params)
                    store1_i64(staged_list_ptr + 8 * j, row_ptr)
            target_ptr = scratch_ptr + params.v_rows_offset + plane * params.v_plane_bytes + BFLOAT * key
            for i in range(0, depth, 8):
                most = transpose_chunk(source_list_ptr, BFLOAT * i, target_ptr + i * pitch, pitch, most)
    return holds_non_finite(most)


@device_function
def exp_some(softmax_ptr: Any) -> None:
    """Computes some chunks of exponentials after each group of products, so that all are done when
    the last group is."""
    credit = load1_i64(softmax_ptr + CREDIT) + load1_i64(softmax_ptr + NUM_CHUNKS)
    groups = load1_i64(softmax_ptr + GROUPS)
    chunk = load1_i64(softmax_ptr + NEXT_CHUNK)
    while credit >= groups:
        exp_chunk(softmax_ptr, chunk)
        credit, chunk = credit - groups, chunk + 1
    store1_i64(softmax_ptr + CREDIT, credit)
    store1_i64(softmax_ptr + NEXT_CHUNK, chunk)


@inline
def multiply_of(
    is_tall: Any, is_wide: Any, a_ptr: Any, a_pitch: Any, b_ptr: Any, b_panel: Any, num_steps: Any, softmax_ptr: Any
) -> None:
    for t in range(num_steps):
        tile_load(4, a_ptr + TILE_ROW * t, a_pitch)
        tile_load(6, b_ptr + TILE * t, VECTOR_BYTES)
        tile_dot(0, 4, 6)
        if is_tall:
            tile_load(5, a_ptr + 16 * a_pitch + TILE_ROW * t, a_pitch)
            tile_dot(2, 5, 6)
        if is_wide:
            tile_load(7, b_ptr + b_panel + TILE * t, VECTOR_BYTES)
            tile_dot(1, 4, 7)
            if is_tall:
                tile_dot(3, 5, 7)
        exp_some(softmax_ptr)


@device_function
def multiply(
    is_tall: Any, is_wide: Any, a_ptr: Any, a_pitch: Any, b_ptr: Any, b_panel: Any, num_steps: Any, softmax_ptr: Any
) -> None:
    """Accumulators += A [32 if is_tall, else 16 rows] . B [two panels if is_wide, else one] over
    num_steps tiles of each, with exponentials computed in between."""
    if is_tall:
        if is_wide:
            multiply_of(True, True, a_ptr, a_pitch, b_ptr, b_panel, num_steps, softmax_ptr)
        else:
            multiply_of(True, False, a_ptr, a_pitch, b_ptr, b_panel, num_steps, softmax_ptr)
    elif is_wide:
        multiply_of(False, True, a_ptr, a_pitch, b_ptr, b_panel, num_steps, softmax_ptr)
    else:
        multiply_of(False, False, a_ptr, a_pitch, b_ptr, b_panel, num_steps, softmax_ptr)


@device_function
def score(params: Any, scoring: Any, softmax_ptr: Any) -> None:
    keys_ptr, q_t_ptr, width, s_ptr = scoring
    pitch, panel, is_wide = params.k_pitch, panel_q_bytes(params), width > 1
    num_steps = plane_bytes(params) // TILE_ROW
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)
    multiply(True, is_wide, keys_ptr, pitch, q_t_ptr, panel, num_steps, softmax_ptr)
    if params.planes == 2:
        # The product of the low planes, too: the log-sum-exp is float32, and 2**-16 of a score
        # would show in it.
        low_ptr, q_low_ptr = keys_ptr + plane_bytes(params), q_t_ptr + num_steps * TILE
        multiply(True, is_wide, low_ptr, pitch, q_t_ptr, panel, num_steps, softmax_ptr)
        multiply(True, is_wide, keys_ptr, pitch, q_low_ptr, panel, num_steps, softmax_ptr)
        multiply(True, is_wide, low_ptr, pitch, q_low_ptr, panel, num_steps, softmax_ptr)
    tile_store(0, s_ptr, VECTOR_BYTES)
    tile_store(2, s_ptr + TILE, VECTOR_BYTES)
    if is_wide:
        tile_store(1, s_ptr + PANEL_S_BYTES, VECTOR_BYTES)
        tile_store(3, s_ptr + PANEL_S_BYTES + TILE, VECTOR_BYTES)


@device_function
def add(params: Any, adding: Any, softmax_ptr: Any, scratch_ptr: Any) -> None:
    key, p_ptr, num_keys, first, end, width, acc_ptr, _ = adding
    pitch, second, is_wide = params.v_pitch, panel_acc_bytes(params), width > 1
    num_steps = ceil_div(num_keys, STEP_N)
    for dim in range(first, end, PAIR_DIMS):
        dim_ptr, is_tall = acc_ptr + dim * VECTOR_BYTES, end - dim >= PAIR_DIMS
        tile_load(0, dim_ptr, VECTOR_BYTES)
        if is_tall:
            tile_load(2, dim_ptr + TILE, VECTOR_BYTES)
        if is_wide:
            tile_load(1, dim_ptr + second, VECTOR_BYTES)
            if is_tall:
                tile_load(3, dim_ptr + second + TILE, VECTOR_BYTES)
        values_ptr = scratch_ptr + params.v_rows_offset + dim * pitch + BFLOAT * key
        multiply(is_tall, is_wide, values_ptr, pitch, p_ptr, PANEL_P_BYTES, num_steps, softmax_ptr)
        if params.planes == 2:
            low_ptr, p_low_ptr = values_ptr + params.v_plane_bytes, p_ptr + params.p_plane_bytes
            multiply(is_tall, is_wide, low_ptr, pitch, p_ptr, PANEL_P_BYTES, num_steps, softmax_ptr)
            multiply(is_tall, is_wide, values_ptr, pitch, p_low_ptr, PANEL_P_BYTES, num_steps, softmax_ptr)
        tile_store(0, dim_ptr, VECTOR_BYTES)
        if is_tall:
            tile_store(2, dim_ptr + TILE, VECTOR_BYTES)
        if is_wide:
            tile_store(1, dim_ptr + second, VECTOR_BYTES)
            if is_tall:
                tile_store(3, dim_ptr + second + TILE, VECTOR_BYTES)


@device_function
def step(params: Any, scoring: Any, softmax_ptr: Any, adding: Any, scratch_ptr: Any) -> None:
    """Interleaves groups of four products, 64 cycles, with about as many cycles of exponentials: a
    CPU looks some 500 instructions ahead, no further."""
    planes, width = params.planes, scoring[2]
    _, _, num_keys, first, end, _, _, _ = adding
    groups = ceil_div(end - first, PAIR_DIMS) * ceil_div(num_keys, STEP_N) * (3 if planes == 2 else 1)
    if width > 0:
        groups += plane_bytes(params) // TILE_ROW * planes * planes
    store1_i64(softmax_ptr + CREDIT, 0)
    store1_i64(softmax_ptr + GROUPS, groups)
    store1_i64(softmax_ptr + NEXT_CHUNK, 0)
    if groups == 0:
        for chunk in range(load1_i64(softmax_ptr + NUM_CHUNKS)):
            exp_chunk(softmax_ptr, chunk)
    if width > 0:
        score(params, scoring, softmax_ptr)
    if first < end:
        add(params, adding, softmax_ptr, scratch_ptr)


@device_function
def scale_acc(params: Any, acc_ptr: Any, alpha_ptr: Any) -> None:
    factor = load_f32(alpha_ptr)
    for i in range(round_up(params.head_size, 16)):
        store_f32(acc_ptr + i * VECTOR_BYTES, load_f32(acc_ptr + i * VECTOR_BYTES) * factor)
