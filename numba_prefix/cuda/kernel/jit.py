"""Device functions that compile without a driver.

Numba compiles a device function for the current device, which it asks the driver for. Numba's own
alternative, inlining functions as its IR, compiles each of them again at every place: 15 s a kernel
instead of 6.

"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from numba.cuda.compiler import compile_cuda
from numba.cuda.dispatcher import CUDADispatcher

from numba_prefix.runtime.typing_cache import remembered_types

# No fastmath: infinities and NaN are real here.
OPTIONS = {"debug": False, "lineinfo": False, "fastmath": False}
_target: list[tuple[int, int]] = []


@contextlib.contextmanager
def compiling_for(cc: tuple[int, int]) -> Iterator[None]:
    """A context in which device functions are compiled for compute capability `cc`. One at once in
    a process."""
    _target.append(cc)
    try:
        with remembered_types():
            yield
    finally:
        _target.pop()


class DeviceFunction(CUDADispatcher):
    """Part of every kernel that calls it: LLVM inlines it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, {**OPTIONS, "device": True, "opt": True, "forceinline": True})
        self._overloads_of: dict[tuple[int, int], Any] = {}

    def compile_device(self, args: Any, return_type: Any = None) -> Any:
        cc = _target[-1]
        self.overloads: Any = self._overloads_of.setdefault(cc, {})
        if args not in self.overloads:
            with self._compiling_counter:
                made = compile_cuda(
                    self.py_func,
                    return_type,
                    args,
                    **OPTIONS,
                    forceinline=True,
                    inline="never",
                    nvvm_options={"opt": 3, "fastmath": False},
                    cc=cc,
                )
                self.overloads[args] = made
                made.target_context.insert_user_function(made.entry_point, made.fndesc, [made.library])
        return self.overloads[args]


def inline(function: Callable[..., Any]) -> Any:
    return DeviceFunction(function)
