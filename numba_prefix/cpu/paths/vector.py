"""Path `vector`: every dtype, by multiply-adds in float32 on any CPU that LLVM has vectors for."""

from __future__ import annotations

from numba_prefix.cpu.kernel.scratch import f32_scratch
from numba_prefix.cpu.paths.record import MicroKernels, Path, Scratch


def _missing() -> str:
    return ""


def _micro_kernels() -> MicroKernels:
    from numba_prefix.cpu.kernel import prefill_f32
    from numba_prefix.cpu.kernel.work_loop import nothing

    return MicroKernels(prefill_f32.load_queries, prefill_f32.attend_keys, nothing, nothing)


def _scratch(dtype: str, head_size: int, tile_rows: int) -> Scratch:
    return f32_scratch(head_size, tile_rows)


PATH = Path(
    name="vector",
    dtypes=("bfloat16", "float16", "float32"),
    missing=_missing,
    micro_kernels=_micro_kernels,
    scratch=_scratch,
    # With twice the rows, keys and values are widened half as often: 1.02 times with head size 64,
    # 1.01 with 128 (AVX2, 2,048 causal tokens, one thread and two; 384 and 512 rows: 1.00 and
    # 1.01).
    tile_heights=(256,),
    tiles_per_thread=32,
    guessed_speed=1.0,
    is_exact=True,
)
