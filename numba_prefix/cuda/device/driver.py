"""The CUDA driver, as far as it is used here: the one module that knows its Python binding.

Handles, addresses and streams are integers. A stream of 1 is the legacy default stream.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from numba_prefix.inputs.errors import TargetUnavailableError
from numba_prefix.runtime.signal_guard import keep_over_forks

LEGACY_STREAM = 1
KEPT_BYTES = 64 << 20  # of freed device memory, for the next call that needs some

_EXPECTED = "target: got 'cuda', expected 'cpu' or 'reference'"
INSTALL = "pip install 'numba-prefix[cuda]'"
_FORKED = (
    f"{_EXPECTED} in this process: its parent had used CUDA before it forked, after which CUDA works in the parent only "
    "(start such processes with multiprocessing's 'spawn' or 'forkserver' method)"
)


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; `name` is the driver's own name of the error, such as
    CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, call: str, name: str, text: str = "") -> None:
        super().__init__(f"CUDA driver: {call} failed with {name}{f' ({text})' if text else ''}")
        self.name = name


class Driver:
    """The driver of this process. Methods raise DriverError; those on a device's memory, streams
    and events need its context to be current."""

    def __init__(self) -> None:
        """Raises ImportError without the binding, DriverError or RuntimeError without a driver or a
        GPU."""
        from cuda.bindings import driver as api

        self._api = api
        self._launch = api.cuLaunchKernel
        self._pools: dict[int, Any] = {}
        self.pid = os.getpid()
        self.kept: dict[Any, Any] = {}  # of other modules, for as long as the driver is used
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._api, name)(*arguments)
        if error:
            raise self._error(name, error)
        return values[0] if values else None

    def _error(self, call: str, error: Any) -> DriverError:
        text = self._api.cuGetErrorString(error)[1]
        return DriverError(call, error.name, text.decode() if text else "")

    # devices and contexts

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def device_name(self, ordinal: int) -> str:
        name: bytes = self._call("cuDeviceGetName", 256, self._call("cuDeviceGet", ordinal))
        return name.split(b"\0")[0].decode()

    def attribute(self, ordinal: int, name: str) -> int:
        """name: of CUdevice_attribute, without its prefix."""
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._call("cuDeviceGet", ordinal)))

    def retain_primary(self, ordinal: int) -> int:
        """The context that all of a process share, torch and CuPy among them."""
        return int(self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal)))

    def current_context(self) -> int:
        """The calling thread's; 0 for none."""
        return int(self._call("cuCtxGetCurrent"))

    def push(self, context: int) -> None:
        self._call("cuCtxPushCurrent", self._api.CUcontext(context))

    def pop(self) -> None:
        self._call("cuCtxPopCurrent")

    # kernels

    def load_library(self, cubin: bytes) -> int:
        return int(self._call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0))

    def get_kernel(self, library: int, name: str) -> int:
        return int(self._call("cuLibraryGetKernel", self._api.CUlibrary(library), name.encode()))

    def get_function(self, kernel: int) -> int:
        """A kernel of the current context, loaded there: the first launch, which may be captured,
        has nothing left to do."""
        return int(self._call("cuKernelGetFunction", self._api.CUkernel(kernel)))

    def allow_shared(self, kernel: int, ordinal: int, num_bytes: int) -> None:
        """Let blocks of a kernel have this much dynamic shared memory."""
        attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = self._call("cuDeviceGet", ordinal)
        self._call("cuKernelSetAttribute", attribute, num_bytes, self._api.CUkernel(kernel), device)

    def launch(self, function: int, grid: int, block: int, shared_bytes: int, stream: int, parameters: int) -> None:
        """parameters: address of an array with the addresses of all parameters, which are
        copied."""
        (error,) = self._launch(function, grid, 1, 1, block, 1, 1, shared_bytes, stream, parameters, 0)
        if error:
            raise self._error("cuLaunchKernel", error)

    # order

    def create_stream(self) -> int:
        """One that does not wait for the legacy default stream, nor the other way round."""
        return int(self._call("cuStreamCreate", self._api.CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", self._api.CUstream(stream))

    def is_capturing(self, stream: int) -> bool:
        status = self._call("cuStreamIsCapturing", self._api.CUstream(stream))
        return bool(status != self._api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def exchange_capture_mode(self, mode: int) -> int:
        """Set what the calling thread may do while it or another one captures: 0 to 2, from strict
        to relaxed. Returns the mode before."""
        return int(self._call("cuThreadExchangeStreamCaptureMode", self._api.CUstreamCaptureMode(mode)))

    def create_event(self) -> int:
        return int(self._call("cuEventCreate", self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", self._api.CUevent(event))

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", self._api.CUevent(event), self._api.CUstream(stream))

    def wait(self, stream: int, event: int) -> None:
        """Have all that comes on the stream from now on wait for the event."""
        self._call("cuStreamWaitEvent", self._api.CUstream(stream), self._api.CUevent(event), 0)

    def is_done(self, event: int) -> bool:
        (error,) = self._api.cuEventQuery(self._api.CUevent(event))
        if error and error != self._api.CUresult.CUDA_ERROR_NOT_READY:
            raise self._error("cuEventQuery", error)
        return not error

    def finish(self, event: int) -> None:
        """Waits for the event."""
        self._call("cuEventSynchronize", self._api.CUevent(event))

    # memory

    def malloc(self, ordinal: int, num_bytes: int, stream: int) -> int:
        """Memory for what comes on the stream."""
        pool = self._pool(ordinal)
        if pool is None:
            return int(self._call("cuMemAlloc", num_bytes))
        return int(self._call("cuMemAllocFromPoolAsync", num_bytes, pool, self._api.CUstream(stream)))

    def free(self, ordinal: int, address: int, stream: int) -> None:
        """Gives memory back once all that came on the stream is done."""
        pointer = self._api.CUdeviceptr(address)
        if self._pool(ordinal) is None:
            self._call("cuMemFree", pointer)  # waits for the whole device
        else:
            self._call("cuMemFreeAsync", pointer, self._api.CUstream(stream))

    def _pool(self, ordinal: int) -> Any:
        """A memory pool of our own, or None where the device has no such thing (some virtual and
        embedded ones)."""
        if ordinal not in self._pools:
            self._pools[ordinal] = (
                self._make_pool(ordinal) if self.attribute(ordinal, "MEMORY_POOLS_SUPPORTED") else None
            )
        return self._pools[ordinal]

    def _make_pool(self, ordinal: int) -> Any:
        api = self._api
        properties = api.CUmemPoolProps()
        properties.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        pool = self._call("cuMemPoolCreate", properties)
        threshold = api.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        self._call("cuMemPoolSetAttribute", pool, threshold, api.cuuint64_t(KEPT_BYTES))
        return pool

    def to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy from pageable memory, which may be changed as soon as this returns."""
        self._call("cuMemcpyHtoDAsync", self._api.CUdeviceptr(target), source, num_bytes, self._api.CUstream(stream))

    def to_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """The memory holds the data once the stream is synchronized."""
        self._call("cuMemcpyDtoHAsync", target, self._api.CUdeviceptr(source), num_bytes, self._api.CUstream(stream))

    def host_mapped(self, num_bytes: int) -> tuple[int, int]:
        """Host memory that kernels of all devices can write to, kept for good: its addresses for
        the host and for them."""
        flags = self._api.CU_MEMHOSTALLOC_PORTABLE | self._api.CU_MEMHOSTALLOC_DEVICEMAP
        host = int(self._call("cuMemHostAlloc", num_bytes, flags))
        return host, int(self._call("cuMemHostGetDevicePointer", host, 0))


_driver: Driver | None = None
_lock = threading.RLock()
keep_over_forks(_lock)


def get_driver() -> Driver:
    """The driver of this process, loaded at the first call. Raises TargetUnavailableError where
    there is none that works."""
    driver = _driver or _load()
    check_process(driver)
    return driver


def check_process(driver: Driver) -> None:
    """Raise TargetUnavailableError in a process that was forked since the driver was loaded."""
    if driver.pid != os.getpid():
        raise TargetUnavailableError(_FORKED)


def _load() -> Driver:
    global _driver  # noqa: PLW0603 - there is one driver in a process
    with _lock:
        if _driver is not None:
            return _driver
        try:
            driver = Driver()
        except ImportError as error:
            raise TargetUnavailableError(f"{_EXPECTED}: the package cuda-bindings is missing ({INSTALL})") from error
        except DriverError as error:
            raise TargetUnavailableError(_without_gpu(error)) from error
        except RuntimeError as error:  # the binding's own; its class differs between versions
            found = str(error).split("\n")[0]
            raise TargetUnavailableError(f"{_EXPECTED}: no NVIDIA driver was found; install one ({found})") from error
        if driver.device_count() == 0:
            raise TargetUnavailableError(f"{_EXPECTED}: the driver finds no GPU")
        _driver = driver
        return driver


def _without_gpu(error: DriverError) -> str:
    if error.name == "CUDA_ERROR_NOT_INITIALIZED":
        return _FORKED
    if error.name == "CUDA_ERROR_NO_DEVICE":
        return f"{_EXPECTED}: the driver finds no GPU ({error.name}; CUDA_VISIBLE_DEVICES may hide it)"
    return f"{_EXPECTED}: {error}"
