"""AMX's instructions on tiles: registers of 16 rows of 64 bytes, numbered 0 to 7.

A thread has to call enter_tiles before and leave_tiles after; the process needs the kernel's
permission (cpu/isa.py).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_prefix.cpu.simd.memory import pointer

I8 = ir.IntType(8)
NUM_TILES = 8
# Palette 1; bytes of a row from byte 16 on (16 bits each), numbers of rows from byte 48 on.
_CONFIG = bytes([1] + [0] * 15 + [64, 0] * NUM_TILES + [0] * 16 + [16] * NUM_TILES + [0] * 8)


def _call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _numbers(*tiles: Any) -> list[ir.Constant] | None:
    """Tile numbers as constants of an instruction; None unless all are literals."""
    if not all(isinstance(tile, types.IntegerLiteral) for tile in tiles):
        return None
    return [ir.Constant(I8, tile.literal_value) for tile in tiles]


def _make(name: str, num_tiles: int, has_memory: bool) -> Any:
    """An instruction with so many tile numbers, and with an address and a stride in bytes if
    has_memory."""

    def answer(numbers: Any, given: tuple[Any, ...]) -> Any:
        if numbers is None:
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            memory = [pointer(builder, args[num_tiles], I8), args[num_tiles + 1]] if has_memory else []
            _call(builder, name, *numbers, *memory)
            return context.get_dummy_value()

        return types.void(*given), codegen

    @intrinsic
    def one(typingctx: Any, tile: Any) -> Any:
        return answer(_numbers(tile), (tile,))

    @intrinsic
    def with_memory(typingctx: Any, tile: Any, address: Any, stride: Any) -> Any:
        return answer(_numbers(tile), (tile, types.int64, types.int64))

    @intrinsic
    def three(typingctx: Any, c: Any, a: Any, b: Any) -> Any:
        return answer(_numbers(c, a, b), (c, a, b))

    return with_memory if has_memory else one if num_tiles == 1 else three


tile_zero = _make("tilezero", 1, False)
tile_load = _make("tileloadd64", 1, True)
tile_store = _make("tilestored64", 1, True)
# C[m, n] += sum over k of A[m, k][0] * B[k, n][0] + A[m, k][1] * B[k, n][1], of pairs of bfloat16
# into float32
tile_dot = _make("tdpbf16ps", 3, False)


@intrinsic
def enter_tiles(typingctx: Any) -> Any:
    """Gives all tiles 16 rows of 64 bytes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        config = cgutils.global_constant(builder, "tile_config", ir.Constant(ir.ArrayType(I8, 64), bytearray(_CONFIG)))
        _call(builder, "ldtilecfg", builder.bitcast(config, I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def leave_tiles(typingctx: Any) -> Any:
    """Back to no tiles in use, which the kernel need not save."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen
