"""The CUDA target's own kernels without a GPU: what a fake driver loads as their cubin is their PTX."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import standins
from ptx.device import FakeDriver, interpreted

from numba_prefix import disk
from numba_prefix.cuda import cubins, spec
from numba_prefix.cuda.compile import Compiled, compile_kernel, toolchain
from numba_prefix.errors import TargetUnavailableError


def install(monkeypatch: Any, cc: tuple[int, int] = (8, 0), **options: Any) -> FakeDriver:
    """A fake driver that interprets them, in place of the process's own; skips where they cannot be compiled."""
    try:
        toolchain()
    except TargetUnavailableError as error:
        pytest.skip(str(error))
    fake = standins.install(monkeypatch, cc=cc, execute=interpreted, **options)
    monkeypatch.setattr(cubins, "kernel", compiled)
    return fake


@functools.cache
def compiled(kernel: spec.KernelSpec, cc: tuple[int, int]) -> Compiled:
    """In place of cubins.kernel. PTX is kept beside the cubins, which are kept without."""
    name, key = f"{cubins._file_name(kernel, cc)}-ptx", cubins._key(kernel, cc) + b" ptx"
    kept = disk.load(name, key)
    if kept is None:
        made = compile_kernel(kernel, cc)
        made = replace(made, cubin=made.ptx.encode())
        disk.save(name, key, cubins._packed(made))
        return made
    return cubins._unpacked(kept, cc)
