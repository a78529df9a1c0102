"""Keys and values as bfloat16 in a worker's scratch, laid out as the paths for pairs want them (call.pairs_layout).

A bfloat16 stays what it is. A float16 becomes the sum of two, exactly: `high`, what is left of it when its last bits are cut
off, and `low`, the rest, kept apart in a second part. Infinities and NaN are all in the high part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline, part
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.paged_kv import load_lanes
from numba_prefix.cpu.kernel.sizes import BFLOAT, PAIR_DIMS
from numba_prefix.cpu.simd.bf16_pairs import copy_16, from_bits, high_bits, join_pairs, store_16, store_i32
from numba_prefix.cpu.simd.memory import (
    any_lane,
    is_not_finite,
    load1_i64,
    splat_f32,
    store1_f32,
    store1_i64,
    store_f32,
)
from numba_prefix.rules.elementwise import where
from numba_prefix.rules.tiling import round_up

ZERO = np.float32(0.0)


@inline
def low_part(x: Any) -> Any:
    """What is left of a float16 without its high part."""
    return where(is_not_finite(x), ZERO, x - from_bits(high_bits(x)))


@part
def load_tail(dtype: Any, address: Any, count: Any, spare: Any) -> Any:
    """The last `count` elements of a row, fewer than 16, as lanes, the others 0; nothing past them is read."""
    for i in range(0, 32, 4):
        store1_f32(spare + i, ZERO)
    for i in range(count):
        copy_16(address + BFLOAT * i, spare + BFLOAT * i)
    return load_lanes(c.FLOAT16, spare) if dtype == c.FLOAT16 else load_lanes(c.BFLOAT16, spare)


@inline
def store_parts(parts: Any, x: Any, target: Any, to_low: Any) -> None:
    store_16(target, high_bits(x))
    if parts == 2:
        store_16(target + to_low, high_bits(low_part(x)))


@inline
def fill_row(parts: Any, size: Any, target: Any, to_low: Any) -> None:
    """Zeros from a row's last whole vector on to a whole number of tiles."""
    if round_up(size, 16) < round_up(size, PAIR_DIMS):
        store_parts(parts, splat_f32(ZERO), target + BFLOAT * round_up(size, 16), to_low)


@inline
def pack_rows_of(
    dtype: Any, parts: Any, is_clean: Any, rows: Any, num_rows: Any, size: Any, target: Any, pitch: Any, spare: Any
) -> Any:
    to_low = BFLOAT * round_up(size, PAIR_DIMS)
    whole = size // 16 * 16
    special = splat_f32(ZERO) != ZERO
    for j in range(num_rows):
        source, to = load1_i64(rows + 8 * j), target + j * pitch
        for i in range(0, round_up(size, 16), 16):
            at = source + BFLOAT * i
            x = load_lanes(dtype, at) if i < whole else load_tail(dtype, at, size - i, spare)
            if is_clean:
                x = where(is_not_finite(x), ZERO, x)
            elif parts == 2:
                special = special | is_not_finite(x)
            store_parts(parts, x, to + BFLOAT * i, to_low)
        fill_row(parts, size, to, to_low)
    return any_lane(special)


@part
def pack_rows(params: Any, is_clean: Any, rows: Any, num_rows: Any, target: Any, spare: Any) -> Any:
    """Rows from a list of addresses as [part][dimension], K_PITCH bytes from one to the next. Infinities and NaN become 0 if
    is_clean; otherwise, whether there are any in float16 ones."""
    a = rows, num_rows, params.head_size, target, params.k_pitch, spare
    if params.planes == 2:
        return pack_rows_of(c.FLOAT16, 2, True, *a) if is_clean else pack_rows_of(c.FLOAT16, 2, False, *a)
    return pack_rows_of(c.BFLOAT16, 1, True, *a) if is_clean else pack_rows_of(c.BFLOAT16, 1, False, *a)


@part
def pack_query(params: Any, row: Any, target: Any) -> Any:
    """A float32 row as bfloat16; whether it holds infinities or NaN."""
    size = params.head_size
    to_low = BFLOAT * round_up(size, PAIR_DIMS)
    special = splat_f32(ZERO) != ZERO
    for i in range(0, size, 16):
        x = load_lanes(c.FLOAT32, row + 4 * i)
        special = special | is_not_finite(x)
        if params.planes == 2:
            store_parts(2, x, target + BFLOAT * i, to_low)
        else:
            store_parts(1, x, target + BFLOAT * i, to_low)
    if params.planes == 2:
        fill_row(2, size, target, to_low)
    else:
        fill_row(1, size, target, to_low)
    return any_lane(special)


@inline
def join_rows_of(is_clean: Any, first: Any, second: Any, size: Any, target: Any, spare: Any) -> Any:
    whole = size // 16 * 16
    special = splat_f32(ZERO) != ZERO
    for i in range(0, round_up(size, 16), 16):
        if i < whole:
            a, b = load_lanes(c.BFLOAT16, first + BFLOAT * i), load_lanes(c.BFLOAT16, second + BFLOAT * i)
        else:
            a = load_tail(c.BFLOAT16, first + BFLOAT * i, size - i, spare)
            b = load_tail(c.BFLOAT16, second + BFLOAT * i, size - i, spare)
        if is_clean:
            a, b = where(is_not_finite(a), ZERO, a), where(is_not_finite(b), ZERO, b)
        else:
            special = special | is_not_finite(a) | is_not_finite(b)
        store_i32(target + 4 * i, join_pairs(high_bits(a), high_bits(b)))
    return any_lane(special)


@part
def join_rows(params: Any, is_clean: Any, first: Any, second: Any, target: Any, spare: Any) -> Any:
    """Two bfloat16 value rows as one of pairs; whether they hold infinities or NaN, which become 0 if is_clean."""
    a = first, second, params.head_size, target, spare
    return join_rows_of(True, *a) if is_clean else join_rows_of(False, *a)


@inline
def list_zeros(rows: Any, num_rows: Any, length: Any, zero_row: Any) -> None:
    """Past its end, a list of rows names a row of zeros."""
    for j in range(num_rows, length):
        store1_i64(rows + 8 * j, zero_row)


@inline
def clear_row(params: Any, scratch: Any) -> None:
    """ZERO_ROW becomes what its name says."""
    for i in range(0, round_up(params.head_size, PAIR_DIMS) * BFLOAT, 64):
        store_f32(scratch + params.zero_row_offset + i, splat_f32(ZERO))
