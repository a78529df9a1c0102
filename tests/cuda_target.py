"""The CUDA target on machines without a GPU: its own kernels, compiled for a compute capability and their PTX interpreted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cases import Case
from device_arrays import DeviceArray
from ptx import Memory, Module
from ptx.device import FakeDriver, Launched, interpreted

import numba_prefix as nbp
from numba_prefix.cuda import compile as compiler
from numba_prefix.cuda import cubins, driver
from numba_prefix.cuda.spec import KernelSpec

CCS = ((7, 5), (8, 0), (9, 0), (12, 0))
Execute = Callable[[Launched, Memory], None]


@functools.cache
def compiled(spec: KernelSpec, cc: tuple[int, int]) -> compiler.Compiled:
    """Once per session; its PTX stands where its cubin would."""
    source, code = compiler._lto_ir(spec)
    ptx = compiler._link(code, cc, "ptx")[0].rstrip(b"\0")
    sizes = source.threads, source.shared_bytes, source.block_m, source.block_n
    return compiler.Compiled(source.name, cc, ptx, *sizes, 0, 0, 0, 0, ptx.decode())


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
