"""Path `amx`: the products of pairs of bfloat16 on AMX's tiles, 32 keys or dimensions times 32 rows at a time.

Tiles 0 to 3 are accumulators [A's upper or lower 16 rows, first or second column], 4 and 5 hold A, 6 and 7 hold B.
"""

from __future__ import annotations

from typing import Any

from numba_prefix.cpu.compile.jit import inline, part
from numba_prefix.cpu.kernel.prefill_bf16 import column_acc, column_q, part_bytes
from numba_prefix.cpu.kernel.prefill_bf16_pack import pack_rows
from numba_prefix.cpu.kernel.prefill_bf16_softmax import CREDIT, GROUPS, NUM_UNITS, UNIT, weigh_unit
from numba_prefix.cpu.kernel.sizes import BFLOAT, PAIR_DIMS, PANEL_P_BYTES, PANEL_S_BYTES, STEP_N, VECTOR_BYTES
from numba_prefix.cpu.simd.amx_tiles import tile_dot, tile_load, tile_store, tile_zero
from numba_prefix.cpu.simd.bf16_pairs import holds_special, transpose_chunk
from numba_prefix.cpu.simd.memory import load1_i64, load_f32, splat_i32, store1_i64, store_f32
from numba_prefix.rules.tiling import ceil_div, round_up

TILE = 16 * VECTOR_BYTES  # bytes
TILE_ROW = 64


@part
def pack_values(params: Any, is_clean: Any, rows: Any, num_keys: Any, scratch: Any) -> Any:
    """V_ROWS as [part][dimension][key]; whether there are infinities or NaN, which become 0 if is_clean."""
    depth, pitch = round_up(params.head_size, 16), params.v_pitch
    staged, listed, spare = (
        scratch + params.staging_offset,
        scratch + params.entries_offset,
        scratch + params.entries_offset + 8 * STEP_N,
    )
    # Whole vectors of bfloat16 are transposed from where they lie.
    is_staged = params.planes == 2 or depth > params.head_size or is_clean
    most = splat_i32(0)
    for key in range(0, num_keys, STEP_N):
        if is_staged:
            pack_rows(params, is_clean, rows + 8 * key, STEP_N, staged, spare)
        for p in range(params.planes):
            source = rows + 8 * key
            if is_staged:
                source = listed
                for j in range(STEP_N):
                    store1_i64(listed + 8 * j, staged + j * params.k_pitch + p * part_bytes(params))
            target = scratch + params.v_rows_offset + p * params.v_plane_bytes + BFLOAT * key
            for i in range(0, depth, 8):
                most = transpose_chunk(source, BFLOAT * i, target + i * pitch, pitch, most)
    return holds_special(most)


@part
def weigh_some(weighing: Any) -> None:
    """After each group of products: so many units of weights that all are done when the last group is."""
    credit, groups = load1_i64(weighing + CREDIT) + load1_i64(weighing + NUM_UNITS), load1_i64(weighing + GROUPS)
    unit = load1_i64(weighing + UNIT)
    while credit >= groups:
        weigh_unit(weighing, unit)
        credit, unit = credit - groups, unit + 1
    store1_i64(weighing + CREDIT, credit)
    store1_i64(weighing + UNIT, unit)


@inline
def multiply_of(
    is_tall: Any, is_wide: Any, a: Any, a_pitch: Any, b: Any, b_column: Any, num_steps: Any, weighing: Any
) -> None:
    for t in range(num_steps):
        tile_load(4, a + TILE_ROW * t, a_pitch)
        tile_load(6, b + TILE * t, VECTOR_BYTES)
        tile_dot(0, 4, 6)
        if is_tall:
            tile_load(5, a + 16 * a_pitch + TILE_ROW * t, a_pitch)
            tile_dot(2, 5, 6)
        if is_wide:
            tile_load(7, b + b_column + TILE * t, VECTOR_BYTES)
            tile_dot(1, 4, 7)
            if is_tall:
                tile_dot(3, 5, 7)
        weigh_some(weighing)


@part
def multiply(
    is_tall: Any, is_wide: Any, a: Any, a_pitch: Any, b: Any, b_column: Any, num_steps: Any, weighing: Any
) -> None:
    """Accumulators += A [32 if is_tall, else 16 rows] . B [two columns if is_wide, else one] over num_steps tiles of each, with
    weights computed in between."""
    if is_tall:
        if is_wide:
            multiply_of(True, True, a, a_pitch, b, b_column, num_steps, weighing)
        else:
            multiply_of(True, False, a, a_pitch, b, b_column, num_steps, weighing)
    elif is_wide:
        multiply_of(False, True, a, a_pitch, b, b_column, num_steps, weighing)
    else:
        multiply_of(False, False, a, a_pitch, b, b_column, num_steps, weighing)


@part
def score(params: Any, scoring: Any, weighing: Any) -> None:
    keys, q_t, width, s = scoring
    pitch, column, is_wide = params.k_pitch, column_q(params), width > 1
    num_steps = part_bytes(params) // TILE_ROW
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)
    multiply(True, is_wide, keys, pitch, q_t, column, num_steps, weighing)
    if params.planes == 2:
        # The low parts' product, too: the log-sum-exp is float32, and 2**-16 of a score would show in it.
        low, q_low = keys + part_bytes(params), q_t + num_steps * TILE
        multiply(True, is_wide, low, pitch, q_t, column, num_steps, weighing)
        multiply(True, is_wide, keys, pitch, q_low, column, num_steps, weighing)
        multiply(True, is_wide, low, pitch, q_low, column, num_steps, weighing)
    tile_store(0, s, VECTOR_BYTES)
    tile_store(2, s + TILE, VECTOR_BYTES)
    if is_wide:
        tile_store(1, s + PANEL_S_BYTES, VECTOR_BYTES)
        tile_store(3, s + PANEL_S_BYTES + TILE, VECTOR_BYTES)


@part
def add(params: Any, adding: Any, weighing: Any, scratch: Any) -> None:
    key, p, num_keys, first, end, width, acc, _ = adding
    pitch, second, is_wide = params.v_pitch, column_acc(params), width > 1
    num_steps = ceil_div(num_keys, STEP_N)
    for dim in range(first, end, PAIR_DIMS):
        at, is_tall = acc + dim * VECTOR_BYTES, end - dim >= PAIR_DIMS
        tile_load(0, at, VECTOR_BYTES)
        if is_tall:
            tile_load(2, at + TILE, VECTOR_BYTES)
        if is_wide:
            tile_load(1, at + second, VECTOR_BYTES)
            if is_tall:
                tile_load(3, at + second + TILE, VECTOR_BYTES)
        values = scratch + params.v_rows_offset + dim * pitch + BFLOAT * key
        multiply(is_tall, is_wide, values, pitch, p, PANEL_P_BYTES, num_steps, weighing)
        if params.planes == 2:
            low, p_low = values + params.v_plane_bytes, p + params.p_plane_bytes
            multiply(is_tall, is_wide, low, pitch, p, PANEL_P_BYTES, num_steps, weighing)
            multiply(is_tall, is_wide, values, pitch, p_low, PANEL_P_BYTES, num_steps, weighing)
        tile_store(0, at, VECTOR_BYTES)
        if is_tall:
            tile_store(2, at + TILE, VECTOR_BYTES)
        if is_wide:
            tile_store(1, at + second, VECTOR_BYTES)
            if is_tall:
                tile_store(3, at + second + TILE, VECTOR_BYTES)


@part
def step(params: Any, scoring: Any, weighing: Any, adding: Any, scratch: Any) -> None:
    """Groups of four products, 64 cycles, with about as many cycles' worth of weights between them: a CPU looks some 500
    instructions ahead, no further."""
    parts, width = params.planes, scoring[2]
    _, _, num_keys, first, end, _, _, _ = adding
    groups = ceil_div(end - first, PAIR_DIMS) * ceil_div(num_keys, STEP_N) * (3 if parts == 2 else 1)
    if width > 0:
        groups += part_bytes(params) // TILE_ROW * parts * parts
    store1_i64(weighing + CREDIT, 0)
    store1_i64(weighing + GROUPS, groups)
    store1_i64(weighing + UNIT, 0)
    if groups == 0:
        for unit in range(load1_i64(weighing + NUM_UNITS)):
            weigh_unit(weighing, unit)
    if width > 0:
        score(params, scoring, weighing)
    if first < end:
        add(params, adding, weighing, scratch)


@part
def scale_acc(params: Any, acc: Any, alpha: Any) -> None:
    factor = load_f32(alpha)
    for i in range(round_up(params.head_size, 16)):
        store_f32(acc + i * VECTOR_BYTES, load_f32(acc + i * VECTOR_BYTES) * factor)
