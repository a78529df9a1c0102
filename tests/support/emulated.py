"""A pytest plugin (-p emulated): paths whose instructions this CPU lacks, with these imitated in
plain vector code.

Only the instructions are imitated, by Intel's description of them; the code around them is the
shipped code. The process has one set of tiles: problems have to stay on one thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu import isa
from numba_prefix.cpu.compile import cache
from numba_prefix.cpu.compile.jit import device_function, inline
from numba_prefix.cpu.paths import PATHS, Path, amx, avx512_bf16
from numba_prefix.cpu.simd import amx_tiles, bf16_pairs
from numba_prefix.cpu.simd.lanes import call, constant, f32x16, i32x16
from numba_prefix.cpu.simd.memory import load1_i32, load_f32, load_i32, splat_f32, splat_i32, store_f32
from numba_prefix.rules.elementwise import multiply_add, where

TILE = 1024
# NaN: a tile that is used before it is loaded shows.
MEMORY = np.full(amx_tiles.NUM_TILES * TILE, 0xFF, np.uint8)
BASE = MEMORY.ctypes.data
ZERO, SMALLEST = np.float32(0.0), np.float32(2.0**-126)


@device_function
def tile_zero(tile: Any) -> None:
    for row in range(16):
        store_f32(BASE + TILE * tile + 64 * row, splat_f32(ZERO))


@device_function
def tile_load(tile: Any, address: Any, stride: Any) -> None:
    for row in range(16):
        store_f32(BASE + TILE * tile + 64 * row, load_f32(address + stride * row))


@device_function
def tile_store(tile: Any, address: Any, stride: Any) -> None:
    for row in range(16):
        store_f32(address + stride * row, load_f32(BASE + TILE * tile + 64 * row))


@inline
def flushed(x: Any) -> Any:
    """The number as these instructions see it: subnormal ones are 0."""
    return where((x < SMALLEST) & (x > -SMALLEST), ZERO, x)


@device_function
def tile_dot(c: Any, a: Any, b: Any) -> None:
    for row in range(16):
        at = BASE + TILE * c + 64 * row
        firsts, seconds = splat_f32(ZERO), splat_f32(ZERO)
        for k in range(16):
            pair = splat_i32(np.int64(load1_i32(BASE + TILE * a + 64 * row + 4 * k)))
            pairs = load_i32(BASE + TILE * b + 64 * k)
            first, second = flushed(bf16_pairs.first_of_pairs(pair)), flushed(bf16_pairs.second_of_pairs(pair))
            firsts = flushed(multiply_add(first, flushed(bf16_pairs.first_of_pairs(pairs)), firsts))
            seconds = flushed(multiply_add(second, flushed(bf16_pairs.second_of_pairs(pairs)), seconds))
        store_f32(at, flushed(flushed(load_f32(at)) + flushed(firsts + seconds)))


@inline
def nothing() -> None: ...


def _flushed(builder: Any, x: Any) -> Any:
    magnitude = builder.and_(builder.bitcast(x, i32x16.llvm), constant(i32x16, 0x7FFFFFFF))
    is_small = builder.icmp_unsigned("<", magnitude, constant(i32x16, 0x00800000))
    return builder.select(is_small, constant(f32x16, 0.0), x)


def dot_pairs(builder: Any, total: Any, column: Any, scalar: Any) -> Any:
    column, scalar = (builder.bitcast(x, i32x16.llvm) for x in (column, scalar))
    for half in (bf16_pairs.second_half, bf16_pairs.first_half):  # in vdpbf16ps's order
        a, b = (_flushed(builder, half(builder, x)) for x in (column, scalar))
        total = _flushed(builder, call(builder, "llvm.fmuladd", a, b, total))
    return total


def is_real(path: Path) -> bool:
    return isa.obstacle(path) == ""


def install() -> None:
    """Replace the paths, before any code asks for one. Real ones stay real; kernels of the others
    are not kept on disk."""
    lacking = {path for path in PATHS if not is_real(path)}
    if avx512_bf16.PATH in lacking:
        bf16_pairs.dot_pairs = dot_pairs
    if amx.PATH in lacking:
        for name, function in {
            "tile_zero": tile_zero,
            "tile_load": tile_load,
            "tile_store": tile_store,
            "tile_dot": tile_dot,
            "enter_tiles": nothing,
            "leave_tiles": nothing,
        }.items():
            setattr(amx_tiles, name, function)
    isa._missing = lambda path: ""
    isa._usable_from.cache_clear()
    save, load = cache.KernelCache.save_overload, cache.KernelCache.load_overload
    imitated = {f"drain_{path.name}" for path in lacking}

    def save_real(self: Any, *arguments: Any) -> None:
        if self.name not in imitated:
            save(self, *arguments)

    def load_real(self: Any, *arguments: Any) -> Any:
        return None if self.name in imitated else load(self, *arguments)

    cache.KernelCache.save_overload, cache.KernelCache.load_overload = save_real, load_real


install()
