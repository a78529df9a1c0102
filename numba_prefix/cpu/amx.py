"""Path `amx`: the products of pairs of bfloat16 on AMX's tiles, 32 keys or dimensions times 32 rows at a time.

Tiles 0 to 3 are accumulators [A's upper or lower 16 rows, first or second column], 4 and 5 hold A, 6 and 7 hold B.
"""

from __future__ import annotations

from typing import Any

from numba_prefix.cpu import call as c
from numba_prefix.cpu.call import BFLOAT, PAIR_DIMS
from numba_prefix.cpu.jit import inline, part
from numba_prefix.cpu.memory import load1_i64, load_f32, store_f32, transpose_block
from numba_prefix.cpu.packs import join_rows
from numba_prefix.cpu.pairs import COLUMN_P, COLUMN_S, STEP_N, column_acc, column_q
from numba_prefix.cpu.tiles import tile_dot, tile_load, tile_store, tile_zero
from numba_prefix.cpu.vector import COLUMN_ROW, FLOAT
from numba_prefix.tiling import ceil_div, round_up

TILE = 16 * COLUMN_ROW  # bytes
TILE_ROW = 64


@part
def pack_values(call: Any, is_clean: Any, rows: Any, num_keys: Any, scratch: Any) -> Any:
    """V_ROWS as [part][dimension][key]; whether there are infinities or NaN, which become 0 if is_clean."""
    depth, pitch = round_up(call[c.HEAD_SIZE], 16), call[c.V_PITCH]
    joined, part_bytes = scratch + call[c.ROWS], depth * FLOAT
    joined_pitch, spare = call[c.PARTS] * part_bytes + 64, scratch + call[c.ENTRIES]
    is_special = False
    for key in range(0, num_keys, STEP_N):
        for j in range(STEP_N // 2):
            at = rows + 8 * (key + 2 * j)
            first, second = load1_i64(at), load1_i64(at + 8)
            if join_rows(call, is_clean, first, second, joined + j * joined_pitch, part_bytes, spare):
                is_special = True
        for p in range(call[c.PARTS]):
            target = scratch + call[c.V_ROWS] + p * call[c.V_PART] + BFLOAT * key
            for i in range(0, depth, 16):
                transpose_block(joined + p * part_bytes + FLOAT * i, joined_pitch, target + i * pitch, pitch)
    return is_special


@inline
def multiply_of(is_tall: Any, is_wide: Any, a: Any, a_pitch: Any, b: Any, b_column: Any, num_steps: Any) -> None:
    for t in range(num_steps):
        tile_load(4, a + TILE_ROW * t, a_pitch)
        tile_load(6, b + TILE * t, COLUMN_ROW)
        tile_dot(0, 4, 6)
        if is_tall:
            tile_load(5, a + 16 * a_pitch + TILE_ROW * t, a_pitch)
            tile_dot(2, 5, 6)
        if is_wide:
            tile_load(7, b + b_column + TILE * t, COLUMN_ROW)
            tile_dot(1, 4, 7)
            if is_tall:
                tile_dot(3, 5, 7)


@part
def multiply(is_tall: Any, is_wide: Any, a: Any, a_pitch: Any, b: Any, b_column: Any, num_steps: Any) -> None:
    """Accumulators += A [32 if is_tall, else 16 rows] . B [two columns if is_wide, else one] over num_steps tiles of each."""
    if is_tall:
        if is_wide:
            multiply_of(True, True, a, a_pitch, b, b_column, num_steps)
        else:
            multiply_of(True, False, a, a_pitch, b, b_column, num_steps)
    elif is_wide:
        multiply_of(False, True, a, a_pitch, b, b_column, num_steps)
    else:
        multiply_of(False, False, a, a_pitch, b, b_column, num_steps)


@part
def score_step(call: Any, q_t: Any, key: Any, width: Any, s: Any, scratch: Any) -> None:
    dims, pitch, is_wide = round_up(call[c.HEAD_SIZE], PAIR_DIMS), call[c.K_PITCH], width > 1
    keys, at, num_steps = scratch + call[c.K_ROWS] + key * pitch, s + key * COLUMN_ROW, dims // PAIR_DIMS
    tile_zero(0)
    tile_zero(1)
    tile_zero(2)
    tile_zero(3)
    multiply(True, is_wide, keys, pitch, q_t, column_q(call), num_steps)
    if call[c.PARTS] == 2:
        # The low parts' product, too: the log-sum-exp is float32, and 2**-16 of a score would show in it.
        keys_low, q_low = keys + BFLOAT * dims, q_t + dims // 2 * COLUMN_ROW
        multiply(True, is_wide, keys_low, pitch, q_t, column_q(call), num_steps)
        multiply(True, is_wide, keys, pitch, q_low, column_q(call), num_steps)
        multiply(True, is_wide, keys_low, pitch, q_low, column_q(call), num_steps)
    tile_store(0, at, COLUMN_ROW)
    tile_store(2, at + TILE, COLUMN_ROW)
    if is_wide:
        tile_store(1, at + COLUMN_S, COLUMN_ROW)
        tile_store(3, at + COLUMN_S + TILE, COLUMN_ROW)


@part
def scale_acc(call: Any, column: Any, scratch: Any) -> None:
    alpha = load_f32(scratch + call[c.ALPHA] + column * COLUMN_ROW)
    acc = scratch + call[c.ACC] + column * column_acc(call)
    for i in range(round_up(call[c.HEAD_SIZE], 16)):
        store_f32(acc + i * COLUMN_ROW, load_f32(acc + i * COLUMN_ROW) * alpha)


@part
def output_step(
    call: Any, p: Any, num_keys: Any, first: Any, end: Any, width: Any, acc: Any, alpha: Any, scratch: Any
) -> None:
    pitch, second, is_wide = call[c.V_PITCH], column_acc(call), width > 1
    num_steps = ceil_div(num_keys, STEP_N)
    for dim in range(first, end, PAIR_DIMS):
        at, is_tall = acc + dim * COLUMN_ROW, end - dim >= PAIR_DIMS
        tile_load(0, at, COLUMN_ROW)
        if is_tall:
            tile_load(2, at + TILE, COLUMN_ROW)
        if is_wide:
            tile_load(1, at + second, COLUMN_ROW)
            if is_tall:
                tile_load(3, at + second + TILE, COLUMN_ROW)
        values = scratch + call[c.V_ROWS] + dim * pitch
        multiply(is_tall, is_wide, values, pitch, p, COLUMN_P, num_steps)
        if call[c.PARTS] == 2:
            multiply(is_tall, is_wide, values + call[c.V_PART], pitch, p, COLUMN_P, num_steps)
            multiply(is_tall, is_wide, values, pitch, p + call[c.P_PART], COLUMN_P, num_steps)
        tile_store(0, at, COLUMN_ROW)
        if is_tall:
            tile_store(2, at + TILE, COLUMN_ROW)
        if is_wide:
            tile_store(1, at + second, COLUMN_ROW)
            if is_tall:
                tile_store(3, at + second + TILE, COLUMN_ROW)
