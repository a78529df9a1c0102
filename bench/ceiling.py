"""The machine's limits, measured in the same run: the micro-kernel alone on tiles that stay in the
cache, and reading the keys and values once, in order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba.core.caching import NullCache

from numba_prefix.cpu.compile.jit import kernel
from numba_prefix.cpu.kernel.params import Params
from numba_prefix.cpu.kernel.prefill_bf16 import dims_of_step
from numba_prefix.cpu.kernel.prefill_bf16_softmax import alphas_of
from numba_prefix.cpu.kernel.prefill_f32_gemm import MR, NV, output_product, score_product
from numba_prefix.cpu.kernel.sizes import BLOCK_N, FLOAT, STEP_N, STEPS, STRIP, VECTOR_BYTES
from numba_prefix.cpu.paths import VECTOR, Path
from numba_prefix.cpu.simd.memory import load_f32, splat_f32, store_f32
from numba_prefix.cpu.simd.params_view import params_view

ROWS = 16 * NV
ZERO = np.float32(0.0)


def _products(k: Any, v: Any, q: Any, s: Any, acc: Any, alpha: Any, pitch: Any, head_size: Any, count: Any) -> None:
    """Compute the score and output products of one panel with BLOCK_N keys `count` times."""
    for _ in range(count):
        for j in range(0, BLOCK_N, MR):
            score_product(
                k + j * pitch,
                pitch,
                q,
                head_size * VECTOR_BYTES,
                head_size,
                s + j * VECTOR_BYTES,
                BLOCK_N * VECTOR_BYTES,
                0,
            )
        for i in range(0, head_size, MR):
            output_product(
                v + FLOAT * i,
                pitch,
                s,
                BLOCK_N * VECTOR_BYTES,
                BLOCK_N,
                acc + i * VECTOR_BYTES,
                head_size * VECTOR_BYTES,
                alpha,
            )


def _read(address: Any, num_bytes: Any, to: Any) -> None:
    """Sum all numbers, so that the compiler can't drop a load."""
    totals = (splat_f32(ZERO), splat_f32(ZERO), splat_f32(ZERO), splat_f32(ZERO))
    for at in range(0, num_bytes, 4 * VECTOR_BYTES):
        totals = (
            totals[0] + load_f32(address + at),
            totals[1] + load_f32(address + at + VECTOR_BYTES),
            totals[2] + load_f32(address + at + 2 * VECTOR_BYTES),
            totals[3] + load_f32(address + at + 3 * VECTOR_BYTES),
        )
    store_f32(to, totals[0] + totals[1] + totals[2] + totals[3])


def _not_kept(function: Callable[..., Any]) -> Any:
    """A kernel that each process compiles: the disk cache tells kernels apart by name and by the
    package's sources, not by this file's or by the variables that a function closes over."""
    compiled = kernel(function)
    compiled._cache = NullCache()
    return compiled


_compiled = functools.cache(_not_kept)


def products(flops: float, path: Path, dtype: str, head_size: int, num_threads: int) -> Callable[[], Any]:
    """A run of about `flops` operations, by a path's micro-kernels alone."""
    if path is not VECTOR:
        return _pair_products(flops, path, dtype, head_size, num_threads)
    run, pitch = _compiled(_products), head_size * FLOAT + 64
    count = max(1, round(flops / num_threads / (4 * ROWS * BLOCK_N * head_size)))
    rng = np.random.default_rng(0)
    sizes = (BLOCK_N * pitch, BLOCK_N * pitch, NV * head_size * VECTOR_BYTES, NV * BLOCK_N * VECTOR_BYTES)
    arguments, buffers = [], []
    for _ in range(num_threads):
        arrays = [rng.standard_normal(size // FLOAT, np.float32) for size in (*sizes, NV * head_size * VECTOR_BYTES)]
        arrays.append(np.zeros(ROWS, np.float32))  # alpha: the sums do not grow
        buffers.append(arrays)
        arguments.append((*(a.ctypes.data for a in arrays), pitch, head_size, count))
    return _together(run, arguments, buffers)


@functools.cache
def _pair_kernel(path: Path) -> Any:
    kernels = path.micro_kernels()
    (_, _, step), enter, leave = kernels.steps, kernels.enter, kernels.leave

    def products(block: Any, scratch: Any, count: Any) -> None:
        """Compute the score and output products of one panel with BLOCK_N keys `count` times."""
        params = params_view(block)
        softmax_ptr = scratch + params.softmax_offset
        enter()
        for _ in range(count):
            for i in range(STEPS):
                key = i * STEP_N
                keys, s = (
                    scratch + params.k_rows_offset + key * params.k_pitch,
                    scratch + params.s_offset + key * VECTOR_BYTES,
                )
                scoring = keys, scratch + params.q_t_offset, STRIP, s
                acc, alphas = scratch + params.acc_offset, alphas_of(0, softmax_ptr)
                step(
                    params,
                    scoring,
                    softmax_ptr,
                    (0, scratch + params.p_offset, BLOCK_N, *dims_of_step(params, i), STRIP, acc, alphas),
                    scratch,
                )
        leave()

    return _not_kept(products)


def _pair_products(flops: float, path: Path, dtype: str, head_size: int, num_threads: int) -> Callable[[], Any]:
    """The products of bfloat16 zeros, without a softmax: they take the same time whatever the
    values."""
    offsets, size = path.scratch(dtype, head_size, 16 * STRIP)
    params = Params()
    params.set({**offsets, "head_size": head_size})
    count = max(1, round(flops / num_threads / (4 * 16 * STRIP * BLOCK_N * head_size)))
    buffers = [np.zeros(size, np.uint8) for _ in range(num_threads)]
    return _together(_pair_kernel(path), [(params.block, b.ctypes.data, count) for b in buffers], buffers)


def read(num_bytes: float, num_threads: int) -> Callable[[], Any]:
    """A run that reads `num_bytes` bytes of memory, each once."""
    run, share = _compiled(_read), int(num_bytes / num_threads) // (4 * VECTOR_BYTES) * 4 * VECTOR_BYTES
    buffers = [(np.ones(share // FLOAT, np.float32), np.empty(16, np.float32)) for _ in range(num_threads)]
    return _together(run, [(a.ctypes.data, share, to.ctypes.data) for a, to in buffers], buffers)


def _together(run: Any, arguments: list[Any], memory: Any) -> Callable[[], Any]:
    pool = ThreadPoolExecutor(len(arguments))

    def call() -> Any:
        list(pool.map(lambda given: run(*given), arguments))
        return memory

    call()
    return call
