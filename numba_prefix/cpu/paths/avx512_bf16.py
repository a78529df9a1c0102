"""Path `avx512_bf16`: bfloat16 by vdpbf16ps, two products an instruction."""

from __future__ import annotations

from numba_prefix.cpu.kernel.scratch import bf16_scratch
from numba_prefix.cpu.paths.record import MicroKernels, Path, Scratch


def _missing() -> str:
    from numba_prefix.cpu.simd.features import has_pairs

    return "" if has_pairs() else "this CPU has no AVX512-BF16"


def _micro_kernels() -> MicroKernels:
    from numba_prefix.cpu.kernel import avx512_bf16, prefill_bf16
    from numba_prefix.cpu.kernel.work_loop import nothing

    steps = avx512_bf16.pack_values, avx512_bf16.scale_acc, avx512_bf16.step
    return MicroKernels(prefill_bf16.load_queries, prefill_bf16.make_attend(*steps), nothing, nothing, steps)


def _scratch(dtype: str, head_size: int, tile_rows: int) -> Scratch:
    return bf16_scratch(head_size, tile_rows, planes=1, is_by_dim=False)


PATH = Path(
    name="avx512_bf16",
    dtypes=("bfloat16",),
    missing=_missing,
    micro_kernels=_micro_kernels,
    scratch=_scratch,
    tile_heights=(256,),
    tiles_per_thread=32,
    guessed_speed=1.5,
)
