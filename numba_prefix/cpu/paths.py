"""What an instruction-set path is made of: its kernel and the layout of its scratch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from numba_prefix.cpu import isa
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.work_loop import drain, make_drain, nothing


class Steps(NamedTuple):
    """A path's micro-kernels (pairs.make_attend), and what a thread does before and after them."""

    pack_values: Any
    scale_acc: Any
    step: Any
    enter: Any = nothing
    leave: Any = nothing


def steps_of(path: str) -> Steps:
    """Of a path for pairs. Modules of paths that this CPU lacks are not imported otherwise: its compiler may refuse what they
    name."""
    if path == isa.AMX:
        from numba_prefix.cpu.kernel import amx
        from numba_prefix.cpu.simd import amx_tiles

        return Steps(amx.pack_values, amx.scale_acc, amx.step, amx_tiles.enter_tiles, amx_tiles.leave_tiles)
    from numba_prefix.cpu.kernel import avx512_bf16

    return Steps(avx512_bf16.pack_values, avx512_bf16.scale_acc, avx512_bf16.step)


@functools.cache
def kernel_of(path: str) -> Any:
    if path == isa.VECTOR:
        return drain
    from numba_prefix.cpu.kernel import prefill_bf16

    steps = steps_of(path)
    return make_drain(
        f"drain_{path}", prefill_bf16.load_queries, prefill_bf16.make_attend(*steps[:3]), steps.enter, steps.leave
    )


@functools.cache
def layout_of(path: str, dtype: str, head_size: int, tile_rows: int) -> tuple[dict[int, int], int]:
    """By which a kernel finds its way in a worker's scratch, and the scratch's size: call.scratch_layout or pairs_layout."""
    if path == isa.VECTOR:
        return c.scratch_layout(head_size, tile_rows)
    return c.pairs_layout(head_size, tile_rows, 2 if dtype == "float16" else 1, is_by_dim=path == isa.AMX)
