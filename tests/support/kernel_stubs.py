"""Tiny kernels that stand in for a family: what they do is told by the `bias` of their spec. One
kernel = a thread a number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from numba_prefix.cuda.compile import compiler
from numba_prefix.cuda.kernel.spec import KernelSpec, Source

THREADS = 64
SPILLED_THREADS, SPILLED_NUMBERS = 1024, 100  # at most 64 registers for each thread
LOCAL_NUMBERS = 200


def spec_of(kind: str, **changes: Any) -> KernelSpec:
    return KernelSpec(
        **({"family": "fma", "dtype": "float32", "out_dtype": "float32", "head_dim": 32, "bias": kind} | changes)
    )


@contextmanager
def stubs() -> Iterator[None]:
    """All families are these."""
    before = dict(compiler.FAMILIES)
    compiler.FAMILIES.update(dict.fromkeys(before, __name__))
    compiler._lto_ir.cache_clear()
    try:
        yield
    finally:
        compiler.FAMILIES.update(before)
        compiler._lto_ir.cache_clear()


def make(spec: KernelSpec) -> Source:
    function = KINDS[spec.bias]()
    return Source(spec.name, function, SPILLED_THREADS if spec.bias == "spilled" else THREADS, 1 << 16, 64, 32)


def scaled() -> Callable[..., Any]:
    from numba import cuda

    from numba_prefix.cuda.kernel import ptx
    from numba_prefix.cuda.kernel.jit import inline

    @inline
    def place(address: Any) -> Any:
        return address + 4 * np.int64(cuda.threadIdx.x)

    def kernel(params: Any) -> None:
        ptx.store_f32(place(params.out_ptr), ptx.load_f32(place(params.q_ptr)) * params.qk_scale)

    return kernel


def arithmetic() -> Callable[..., Any]:
    """What options could change: a sum of a product, a quotient, a root, and tests for NaN and
    infinity."""
    import math

    from numba_prefix.cuda.kernel import ptx

    def kernel(params: Any) -> None:
        a, b = ptx.load_f32(params.q_ptr), ptx.load_f32(params.k_ptr)
        result = math.sqrt((a * b + params.qk_scale) / b)
        if a != a:  # noqa: PLR0124
            result = np.float32(3)
        if b == np.float32(-np.inf):
            result = result + (a - a)
        ptx.store_f32(params.out_ptr, result)

    return kernel


def double() -> Callable[..., Any]:
    """A literal without a type is a float64, and so is all that it touches."""
    from numba_prefix.cuda.kernel import ptx

    def kernel(params: Any) -> None:
        ptx.store_f32(params.out_ptr, np.float32(ptx.load_f32(params.q_ptr) * 0.1))

    return kernel


def spilled() -> Callable[..., Any]:
    from numba import cuda, float32

    from numba_prefix.cuda.kernel import ptx

    # Each thread has its own: what all have in common would be kept in uniform registers.
    def kernel(params: Any) -> None:
        numbers = cuda.local.array(SPILLED_NUMBERS, float32)
        for i in range(SPILLED_NUMBERS):
            numbers[i] = np.float32(0)
        for n in range(params.k_ptr):
            for i in range(SPILLED_NUMBERS):
                numbers[i] = numbers[i] * params.qk_scale + ptx.load_f32(
                    params.q_ptr + 4 * (n + i + np.int64(cuda.threadIdx.x))
                )
        for i in range(SPILLED_NUMBERS):
            ptx.store_f32(params.out_ptr + 4 * (i + np.int64(cuda.threadIdx.x)), numbers[i])

    return kernel


def local() -> Callable[..., Any]:
    """An array whose index is not known when compiled has no registers."""
    from numba import cuda, float32

    from numba_prefix.cuda.kernel import ptx

    def kernel(params: Any) -> None:
        numbers = cuda.local.array(LOCAL_NUMBERS, float32)
        for n in range(params.k_ptr):
            numbers[ptx.load_i32(params.q_ptr + 4 * n)] = params.qk_scale
            ptx.store_f32(params.out_ptr, numbers[ptx.load_i32(params.q_ptr + 4 * n)])

    return kernel


def products() -> Callable[..., Any]:
    """Two matrix products, and a name that only looks like one."""
    from numba_prefix.cuda.kernel import ptx

    def kernel(params: Any) -> None:
        a = ptx.load_i32(params.q_ptr)
        x = params.qk_scale
        x, y, z, w = ptx.mma_f16(a, a, a, a, a, a, x, x, x, x)
        x, y, z, w = ptx.mma_f16(a, a, a, a, a, a, x, y, z, w)
        ptx.store_f32(params.out_ptr, x)

    return kernel


KINDS = {f.__name__: f for f in (scaled, arithmetic, double, spilled, local, products)}
