"""A CUDA driver over host memory: launches are handed to a function, or to the interpreter of their
PTX.

Work is done in the order in which it is submitted, at once or (is_lazy) only when it is waited for,
as a GPU may. What a real driver refuses while a stream is captured is refused here too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_prefix.cuda.device.driver import LEGACY_STREAM, DriverError
from numba_prefix.cuda.kernel.params import INTEGERS, Params

from .memory import Memory, aligned_bytes
from .module import Module

RELAXED = 2
FIRST_CONTEXT = 1000


@dataclass(frozen=True)
class Launched:
    """A launch, with its parameters as they were then."""

    kernel: str
    cubin: bytes
    grid: int
    block: int
    shared_bytes: int
    stream: int
    params: Any  # a Params


def interpreted(launched: Launched, memory: Memory) -> None:
    """Runs a launch whose "cubin" is PTX."""
    _module(launched.cubin).run(
        launched.kernel,
        grid=launched.grid,
        block=launched.block,
        shared_bytes=launched.shared_bytes,
        arguments=list(launched.params),
        memory=memory,
    )


@functools.lru_cache(maxsize=64)
def _module(ptx: bytes) -> Module:
    return Module(ptx.decode())


def logged(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(self: FakeDriver, *arguments: Any) -> Any:
        self.log.append((method.__name__, arguments))
        return method(self, *arguments)

    return wrapper


class FakeDriver:
    """Has the methods of numba_prefix.cuda.device.driver.Driver."""

    def __init__(
        self,
        cc: tuple[int, int] = (8, 0),
        *,
        num_devices: int = 1,
        max_shared_bytes: int = 160 << 10,
        execute: Callable[[Launched, Memory], None] = interpreted,
        is_lazy: bool = False,
    ) -> None:
        self.pid = os.getpid()
        self.kept: dict[Any, Any] = {}
        self.cc, self.num_devices, self.max_shared_bytes = cc, num_devices, max_shared_bytes
        self.execute, self.is_lazy = execute, is_lazy
        self.memory = Memory()
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self.launches: list[Launched] = []
        self.capturing: set[int] = set()
        self.live: dict[int, np.ndarray] = {}  # what malloc gave and free did not take
        self.shared_allowed: dict[int, int] = {}
        self._contexts = threading.local()
        self._modes = threading.local()
        self._handles = iter(range(1 << 20, 1 << 30, 2))
        self._libraries: dict[int, bytes] = {}
        self._kernels: dict[int, tuple[bytes, str]] = {}
        self._functions: dict[int, int] = {}
        self._events: dict[int, bool] = {}
        self._host_pages: list[np.ndarray] = []
        self._queue: list[Callable[[], None]] = []

    # the test's side

    def names(self, *wanted: str) -> list[str]:
        """Calls so far, or those of certain names."""
        return [name for name, _ in self.log if not wanted or name in wanted]

    def finish_all(self) -> None:
        while self._queue:
            try:
                work = self._queue.pop(0)
            except IndexError:  # garbage was collected in between, and its finalizer did the rest
                return
            work()

    @property
    def contexts(self) -> list[int]:
        """The calling thread's, the current one last."""
        if not hasattr(self._contexts, "stack"):
            self._contexts.stack = []
        stack: list[int] = self._contexts.stack
        return stack

    def register(self, array: np.ndarray, name: str) -> str:
        """Make an array device memory until it is forgotten."""
        unique = f"{name} {next(self._handles)}"
        self.memory.add(unique, array)
        return unique

    def forget(self, unique: str, array: np.ndarray) -> None:
        """Its owner is gone: as with any allocator that knows streams, it stays for what is under
        way."""

        def work(_: np.ndarray = array) -> None:
            self.memory.remove(unique)

        self._submit(work)

    def _submit(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        if not self.is_lazy:
            self.finish_all()

    def _check_current(self, name: str) -> None:
        if not self.contexts:
            raise DriverError(name, "CUDA_ERROR_INVALID_CONTEXT")

    def _check_safe(self, name: str) -> None:
        """What might be unsafe while a stream is captured: anything that is not enqueued."""
        if self.capturing and getattr(self._modes, "mode", 0) != RELAXED:
            raise DriverError(name, "CUDA_ERROR_STREAM_CAPTURE_UNSAFE")

    def _check_idle(self, name: str, stream: int) -> None:
        if stream in self.capturing:
            raise DriverError(name, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    # the driver's side

    @logged
    def device_count(self) -> int:
        return self.num_devices

    @logged
    def device_name(self, ordinal: int) -> str:
        return f"Test GPU {ordinal}"

    @logged
    def attribute(self, ordinal: int, name: str) -> int:
        if not 0 <= ordinal < self.num_devices:
            raise DriverError("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")
        known = {"COMPUTE_CAPABILITY_MAJOR": self.cc[0], "COMPUTE_CAPABILITY_MINOR": self.cc[1]}
        return (known | {"MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": self.max_shared_bytes})[name]

    @logged
    def retain_primary(self, ordinal: int) -> int:
        return FIRST_CONTEXT + ordinal

    @logged
    def current_context(self) -> int:
        return self.contexts[-1] if self.contexts else 0

    @logged
    def push(self, context: int) -> None:
        self.contexts.append(context)

    @logged
    def pop(self) -> None:
        self._check_current("cuCtxPopCurrent")
        self.contexts.pop()

    @logged
    def load_library(self, cubin: bytes) -> int:
        handle = next(self._handles)
        self._libraries[handle] = cubin
        return handle

    @logged
    def get_kernel(self, library: int, name: str) -> int:
        handle = next(self._handles)
        self._kernels[handle] = self._libraries[library], name
        return handle

    @logged
    def get_function(self, kernel: int) -> int:
        self._check_current("cuKernelGetFunction")
        self._functions[kernel + 1] = kernel
        return kernel + 1

    @logged
    def allow_shared(self, kernel: int, ordinal: int, num_bytes: int) -> None:
        if num_bytes > self.max_shared_bytes:
            raise DriverError("cuKernelSetAttribute", "CUDA_ERROR_INVALID_VALUE")
        self.shared_allowed[kernel] = num_bytes

    @logged
    def launch(self, function: int, grid: int, block: int, shared_bytes: int, stream: int, parameters: int) -> None:
        self._check_current("cuLaunchKernel")
        kernel = self._functions[function]
        allowed = self.shared_allowed.get(kernel, 48 << 10)
        if not 0 < grid < 2**31 or not 0 < block <= 1024 or shared_bytes > allowed:
            raise DriverError("cuLaunchKernel", "CUDA_ERROR_INVALID_VALUE")
        pointers = (ctypes.c_uint64 * len(Params._fields)).from_address(parameters)
        types = (ctypes.c_int64 if name in INTEGERS else ctypes.c_float for name in Params._fields)
        params = Params._make(kind.from_address(place).value for kind, place in zip(types, pointers, strict=True))
        cubin, name = self._kernels[kernel]
        launched = Launched(name, cubin, grid, block, shared_bytes, stream, params)
        self.launches.append(launched)
        if stream not in self.capturing:
            self._submit(lambda: self.execute(launched, self.memory))

    @logged
    def create_stream(self) -> int:
        self._check_current("cuStreamCreate")
        return next(self._handles)

    @logged
    def synchronize(self, stream: int) -> None:
        self._check_idle("cuStreamSynchronize", stream)
        self._check_safe("cuStreamSynchronize")
        self.finish_all()

    @logged
    def is_capturing(self, stream: int) -> bool:
        if stream == LEGACY_STREAM and self.capturing:
            raise DriverError("cuStreamIsCapturing", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT")
        return stream in self.capturing

    @logged
    def exchange_capture_mode(self, mode: int) -> int:
        before = getattr(self._modes, "mode", 0)
        self._modes.mode = mode
        return before

    @logged
    def create_event(self) -> int:
        event = next(self._handles)
        self._events[event] = True
        return event

    @logged
    def destroy_event(self, event: int) -> None:
        del self._events[event]

    @logged
    def record(self, event: int, stream: int) -> None:
        self._events[event] = False
        self._submit(lambda: self._events.update({event: True} if event in self._events else {}))

    @logged
    def wait(self, stream: int, event: int) -> None:
        assert event in self._events
        if stream in self.capturing:
            raise DriverError("cuStreamWaitEvent", "CUDA_ERROR_STREAM_CAPTURE_ISOLATION")

    @logged
    def is_done(self, event: int) -> bool:
        self._check_safe("cuEventQuery")
        return self._events[event]

    @logged
    def finish(self, event: int) -> None:
        self._check_safe("cuEventSynchronize")
        while not self._events[event]:
            self._queue.pop(0)()

    @logged
    def malloc(self, ordinal: int, num_bytes: int, stream: int) -> int:
        self._check_current("cuMemAllocFromPoolAsync")
        assert num_bytes > 0
        array = aligned_bytes(num_bytes, 256)
        address = array.ctypes.data
        self.live[address] = array
        self.memory.add(f"malloc {address:#x}", array, is_filled=False)
        return address

    @logged
    def free(self, ordinal: int, address: int, stream: int) -> None:
        self._check_current("cuMemFreeAsync")
        array = self.live.pop(address)

        def work(_: np.ndarray = array) -> None:  # its memory is not used again before
            self.memory.remove(f"malloc {address:#x}")

        self._submit(work)

    @logged
    def to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        data = np.frombuffer(ctypes.string_at(source, num_bytes), np.uint8)
        array = self.live[target]

        def work() -> None:
            array[:num_bytes] = data
            self.memory.remove(f"malloc {target:#x}")
            self.memory.add(f"malloc {target:#x}", array)

        self._submit(work)

    @logged
    def to_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._check_idle("cuMemcpyDtoHAsync", stream)
        self._submit(lambda: ctypes.memmove(target, source, num_bytes) and None)

    @logged
    def host_mapped(self, num_bytes: int) -> tuple[int, int]:
        self._check_safe("cuMemHostAlloc")
        page = aligned_bytes(num_bytes, 4096)
        page[:] = 0
        self._host_pages.append(page)
        self.memory.add(f"host page {page.ctypes.data:#x}", page)
        return page.ctypes.data, page.ctypes.data


def each_call(driver: FakeDriver, *names: str) -> Iterator[tuple[Any, ...]]:
    """The arguments of all calls of these names."""
    return (arguments for name, arguments in driver.log if name in names)
