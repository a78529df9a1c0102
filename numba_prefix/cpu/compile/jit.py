"""All jit options of the CPU target, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

from llvmlite.binding import ffi
from numba.core import config, event
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.extending import register_jitable

from numba_prefix.cpu.compile.cache import KernelCache
from numba_prefix.cpu.compile.device_functions import DeviceFunctionCompiler
from numba_prefix.rules import masks, softmax, tiling
from numba_prefix.runtime.exit_guard import StopAtExit
from numba_prefix.runtime.signal_guard import keep_over_forks
from numba_prefix.runtime.typing_cache import remembered_types

# error_model: an integer division is one instruction, no branch that raises. No fastmath:
# infinities and NaN are real here. boundscheck is off whatever the environment says: indices come
# from the validated plan.
DEVICE_OPTIONS = {"error_model": "numpy", "boundscheck": False, "no_cfunc_wrapper": True, "_nrt": False}
OPTIONS = {"nopython": True, "nogil": True, **DEVICE_OPTIONS}


class Kernel(CPUDispatcher):
    """A kernel is compiled even where NUMBA_DISABLE_JIT asks for Python: there is no Python version
    of it to debug."""

    def compile(self, sig: Any) -> Any:
        listening = event.install_listener("numba:run_pass", _at_exit)
        with global_compiler_lock, _at_exit.compiling(), remembered_types(), listening:
            disabled, config.DISABLE_JIT = config.DISABLE_JIT, 0
            try:
                return super().compile(sig)
            finally:
                config.DISABLE_JIT = disabled


class _StopAtExit(StopAtExit, event.Listener): ...


_at_exit = _StopAtExit()


keep_over_forks(global_compiler_lock)
keep_over_forks(getattr(ffi.lib, "_lock", contextlib.nullcontext()))  # LLVM's own, taken within it and without it


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a kernel at its first call, or loads it from the cache."""
    dispatcher = Kernel(function, targetoptions=dict(OPTIONS))
    dispatcher._cache = KernelCache(function.__name__)
    return dispatcher


def inline(function: Callable[..., Any]) -> Any:
    """A device function: part of every kernel that calls it."""
    return register_jitable(**DEVICE_OPTIONS, forceinline=True, pipeline_class=DeviceFunctionCompiler)(function)


def device_function(function: Callable[..., Any]) -> Any:
    """A function that kernels call, compiled once in each."""
    return register_jitable(**DEVICE_OPTIONS, pipeline_class=DeviceFunctionCompiler)(function)


_CALLED = {tiling.last_run}  # a search in many places: inlined, it took about 1 s of 25 to compile
_NOT_INLINED = {tiling.cut_tiles}  # a kernel of its own
for _module in (masks, softmax, tiling):
    for _rule in vars(_module).values():
        if isinstance(_rule, FunctionType) and _rule.__module__ == _module.__name__ and _rule not in _NOT_INLINED:
            (device_function if _rule in _CALLED else inline)(_rule)
