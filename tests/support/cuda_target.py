"""The CUDA target on machines without a GPU: its own kernels, compiled for a compute capability and
their PTX interpreted."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, Case
from device_arrays import DeviceArray
from ptx import Memory, Module
from ptx.device import FakeDriver, Launched, interpreted

import numba_prefix as nbp
from numba_prefix.cuda.compile import compiler, cubins
from numba_prefix.cuda.device import driver
from numba_prefix.cuda.kernel.spec import CHUNK, KernelSpec, family_of, head_dim_of

CCS = ((7, 5), (8, 0), (9, 0), (12, 0))
Execute = Callable[[Launched, Memory], None]


Kernel = tuple[KernelSpec, tuple[int, int]]

# This session's, by kind and compute capability; a kernel's PTX stands where its cubin would.
kernels: dict[Kernel, compiler.Compiled] = {}
_ahead: dict[KernelSpec, Future[dict[Kernel, compiler.Compiled]]] = {}
_lto_ir = functools.cache(compiler._lto_ir)  # which keeps four; tests come back to one for another compute capability


def spec_of(dtype: str, head_size: int, form: str, cc: tuple[int, int], mask_dtype: str = "float32") -> KernelSpec:
    """The kernel of a case (form: of with_mask)."""
    kind, _, how = form.partition("-")
    bias = {"alibi": "linear", "alibi_sqrt": "sqrt", "alibi_left_align": "left_align"}.get(kind, "none")
    bias = {"template": f"template_{bias}", "heads": "heads_mask"}.get(how, bias)
    mask_dtype = mask_dtype if how in ("template", "heads") else ""
    is_aligned = head_size * np.dtype(DTYPES[dtype]).itemsize % CHUNK == 0
    family, head_dim = family_of(dtype, cc), head_dim_of(head_size)
    return KernelSpec(family, dtype, dtype, head_dim, bias, mask_dtype, is_aligned)


def is_measured(spec: KernelSpec) -> bool:
    """Whether what a kernel takes of a GPU is known here, for which its cubin is made too."""
    return spec.bias in ("none", "heads_mask") and spec.head_dim in (32, 64, 128) and spec.is_aligned


def compiled(spec: KernelSpec, cc: tuple[int, int]) -> compiler.Compiled:
    ahead = _ahead.pop(spec, None)
    if ahead is not None and not ahead.cancel():
        kernels.update(ahead.result())
    if (spec, cc) not in kernels:
        source, code = _lto_ir(spec)
        ptx = compiler._link(code, cc, "ptx")[0].rstrip(b"\0")
        sizes = source.threads, source.shared_bytes, source.block_m, source.block_n
        uses = {"registers": 0, "spill_bytes": 0, "local_bytes": 0}
        if is_measured(spec):
            uses = compiler._resources(compiler._link(code, cc, "cubin")[1])
        kernels[spec, cc] = compiler.Compiled(source.name, cc, ptx, *sizes, **uses, mma_count=0, ptx=ptx.decode())
    return kernels[spec, cc]


def _compiled_for(spec: KernelSpec, ccs: list[tuple[int, int]]) -> dict[Kernel, compiler.Compiled]:
    return {(spec, cc): compiled(spec, cc) for cc in ccs}


def build_ahead(wanted: Iterable[Kernel]) -> None:
    """Compiles many kernels beside the tests, on CPU time that nothing else wants: tests mostly
    take one thread."""
    ccs_of: dict[KernelSpec, list[tuple[int, int]]] = {}
    for spec, cc in dict.fromkeys(wanted):
        ccs_of.setdefault(spec, []).append(cc)
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_give_way)
    _ahead.update({spec: pool.submit(_compiled_for, spec, ccs) for spec, ccs in ccs_of.items()})
    pool.shutdown(wait=False)


def _give_way() -> None:
    if hasattr(os, "nice"):
        os.nice(19)


def forget_ahead() -> None:
    """Nobody waits for what is not begun."""
    for future in _ahead.values():
        future.cancel()


@functools.lru_cache(maxsize=8)
def parsed(ptx: str) -> Module:
    return Module(ptx)


@contextmanager
def gpu(cc: tuple[int, int], execute: Execute = interpreted) -> Iterator[FakeDriver]:
    """A fake GPU in place of the process's driver."""
    fake = FakeDriver(cc=cc, execute=execute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_driver", fake)
        patch.setattr(cubins, "kernel", compiled)
        yield fake


def run(case: Case, cc: tuple[int, int] = (8, 0), execute: Execute = interpreted, **overrides: Any) -> Any:
    """A case's result as NumPy arrays; its arrays go to the GPU, but for the slopes."""
    with gpu(cc, execute) as fake:
        arguments = case.arguments() | {"target": "cuda"} | overrides
        for name, value in arguments.items():
            if isinstance(value, np.ndarray) and name != "slopes":
                arguments[name] = DeviceArray(fake, value)
        made = nbp.prefix_encoder(**arguments)
        return tuple(part.array for part in made) if isinstance(made, tuple) else made.array
