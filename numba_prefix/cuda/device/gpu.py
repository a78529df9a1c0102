"""A GPU as this process uses it: its context, and what plans allocate on it.

Work may still be under way when a plan is gone, on any of the streams that it was run on: what it
allocated is freed behind that work, without waiting.

"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import deque
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from numba_prefix.cuda.device.driver import Driver, DriverError, check_process, get_driver
from numba_prefix.inputs.errors import TargetUnavailableError
from numba_prefix.runtime.signal_guard import keep_over_forks

OLDEST = (7, 5)
Item = TypeVar("Item")
RELAXED = 2  # a mode of Driver.exchange_capture_mode
FLAG_BYTES = 4
FLAGS_PER_PAGE = 1024

_lock = threading.RLock()
keep_over_forks(_lock)


class Flag:
    """An int32 in host memory that kernels can set."""

    __slots__ = ("_value", "address")

    def __init__(self, host_address: int, address: int) -> None:
        self.address = address
        self._value = ctypes.c_int32.from_address(host_address)
        self._value.value = 0

    @property
    def is_set(self) -> bool:
        return self._value.value != 0

    def clear(self) -> None:
        self._value.value = 0


class DeviceAllocation:
    """Device memory and a flag of one plan, given back when this object is gone."""

    def __init__(self, device: Device) -> None:
        """The device's context is current."""
        self.device = device
        self.flag = device._take_flag()
        self._blocks: list[int] = []
        self._streams: dict[int, Any] = {}  # used so far, by handle, with their owners
        finalizer = weakref.finalize(self, device._give_back, self._blocks, self.flag, self._streams)
        finalizer.atexit = False

    def upload(self, source: NDArray[Any]) -> int:
        """The address of a copy that every stream may read from now on. The device's context is
        current."""
        driver, stream = self.device.driver, self.device.stream
        source = np.ascontiguousarray(source)
        address = driver.malloc(self.device.ordinal, source.nbytes, stream)
        self._blocks.append(address)
        driver.to_device(address, source.ctypes.data, source.nbytes, stream)
        driver.synchronize(stream)  # a stream of our own, on which nothing else is waited for
        return address

    def use(self, stream: int, owner: Any) -> None:
        """Note a launch on this stream, which has to live as long as its owner does."""
        if stream not in self._streams:
            self._streams[stream] = owner

    @property
    def streams(self) -> list[int]:
        return list(self._streams)


class _Entered:
    """A device's primary context, current for the calling thread; afterwards what was current
    before is so again."""

    __slots__ = ("_context", "_driver", "_is_pushed", "_mode", "_wants_relaxed")

    def __init__(self, driver: Driver, context: int, wants_relaxed: bool) -> None:
        self._driver, self._context, self._wants_relaxed = driver, context, wants_relaxed

    def __enter__(self) -> None:
        self._is_pushed = self._driver.current_context() != self._context
        if self._is_pushed:
            self._driver.push(self._context)
        if self._wants_relaxed:
            self._mode = self._driver.exchange_capture_mode(RELAXED)

    def __exit__(self, *_: Any) -> None:
        if self._wants_relaxed:
            self._driver.exchange_capture_mode(self._mode)
        if self._is_pushed:
            self._driver.pop()


class Device:
    """One GPU. Raises TargetUnavailableError for one that is too old."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        self.name = driver.device_name(ordinal)
        major, minor = (driver.attribute(ordinal, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self.cc = (major, minor)
        if self.cc < OLDEST:
            raise TargetUnavailableError(
                f"target: got 'cuda' on cuda:{ordinal} ({self.name}), whose compute capability is {major}.{minor}, "
                f"expected a GPU of {OLDEST[0]}.{OLDEST[1]} or newer"
            )
        self.max_shared_bytes = driver.attribute(ordinal, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._context = driver.retain_primary(ordinal)
        with self.current():
            self.stream = driver.create_stream()
        self._free_flags: deque[Flag] = deque()
        self._ending: deque[tuple[int, Flag]] = deque()  # free once the event is done
        self._postponed: deque[tuple[list[int], Flag, dict[int, Any]]] = deque()

    def current(self, *, may_capture: bool = False) -> _Entered:
        """A context to enter by `with`. may_capture: the calling thread may allocate and wait
        although it, or another thread, captures a CUDA graph: nothing that is done within touches a
        stream that is being captured. Raises TargetUnavailableError in a forked child."""
        check_process(self.driver)
        return _Entered(self.driver, self._context, may_capture)

    def is_capturing(self, stream: int) -> bool:
        try:
            return self.driver.is_capturing(stream)
        except DriverError as error:
            # The legacy stream, while another one captures.
            if error.name == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT":
                return True
            raise

    def order(self, stream: int, before: int) -> None:
        """Have all that comes on `stream` from now on wait for what came on `before`."""
        event = self.driver.create_event()
        self.driver.record(event, before)
        self.driver.wait(stream, event)
        self.driver.destroy_event(event)

    def allocate(self) -> DeviceAllocation:
        """Memory and a flag for a new plan. The device's context is current and may capture."""
        for postponed in _taken(self._postponed):
            self._give_back(*postponed)
        return DeviceAllocation(self)

    def _take_flag(self) -> Flag:
        self._recycle_flags()
        while True:
            try:
                flag = self._free_flags.popleft()
            except IndexError:
                host, address = self.driver.host_mapped(FLAGS_PER_PAGE * FLAG_BYTES)
                places = range(0, FLAGS_PER_PAGE * FLAG_BYTES, FLAG_BYTES)
                self._free_flags.extend(Flag(host + place, address + place) for place in places)
            else:
                flag.clear()
                return flag

    def _recycle_flags(self) -> None:
        for event, flag in _taken(self._ending):
            if self.driver.is_done(event):
                self.driver.destroy_event(event)
                self._free_flags.append(flag)
            else:
                self._ending.append((event, flag))

    def _give_back(self, blocks: list[int], flag: Flag, streams: dict[int, Any]) -> None:
        """Called where objects happen to be freed: raises nothing, waits for nothing, takes no
        lock."""
        driver = self.driver
        if driver.pid != os.getpid():
            return
        try:
            with self.current(may_capture=True):
                if any(self.is_capturing(stream) for stream in streams):
                    self._postponed.append((blocks, flag, streams))
                    return
                for stream in streams:
                    self.order(self.stream, stream)
                for address in blocks:
                    driver.free(self.ordinal, address, self.stream)
                event = driver.create_event()
                driver.record(event, self.stream)
                self._ending.append((event, flag))
        except DriverError:  # a stream is gone, or all of CUDA: the memory may still be in use
            pass


def _taken(queue: deque[Item]) -> list[Item]:
    """Pop all that is queued now; safe while other threads pop and push."""
    taken = []
    with contextlib.suppress(IndexError):
        for _ in range(len(queue)):
            taken.append(queue.popleft())
    return taken


def get_device(ordinal: int) -> Device:
    """Raises TargetUnavailableError where it can't be used."""
    driver = get_driver()
    device: Device | None = driver.kept.get(ordinal)
    if device is None:
        with _lock:
            device = driver.kept.get(ordinal)
            if device is None:
                device = driver.kept[ordinal] = Device(driver, ordinal)
    return device
