"""Device memory: named buffers at the addresses that their NumPy arrays have, and nothing else."""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

import numpy as np

from .faults import Fault, GlobalRace, MemoryFault, Misaligned, Uninitialized

_ROW = 32  # bytes: no access is wider, and views begin at a multiple


class Buffer:
    def __init__(self, name: str, array: np.ndarray, is_writable: bool, is_filled: bool) -> None:
        self.name, self.array, self.is_writable = name, array, is_writable
        low, high = np.lib.array_utils.byte_bounds(array) if hasattr(np.lib, "array_utils") else np.byte_bounds(array)
        self.start, self.end = int(low), int(high) if array.size else int(low)
        self.origin = self.start // _ROW * _ROW
        length = -(-(self.end - self.origin) // _ROW) * _ROW
        self._bytes = (
            np.frombuffer((ctypes.c_uint8 * length).from_address(self.origin), np.uint8)
            if length
            else np.zeros(0, np.uint8)
        )
        self._views: dict[Any, np.ndarray] = {}
        self.writer: np.ndarray | None = None  # by byte: the block that wrote it in this launch
        self.filled = None if is_filled else np.zeros(length, bool)
        self.belongs = self._gaps(length)

    def _gaps(self, length: int) -> np.ndarray | None:
        """Which bytes of a strided array's extent are its own; None if all are."""
        array = self.array
        if array.nbytes == self.end - self.start:
            return None
        mine = np.zeros(length, bool)
        offsets = np.array([array.ctypes.data - self.origin])
        for size, stride in zip(array.shape, array.strides, strict=True):
            offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
        for byte in range(array.itemsize):
            mine[offsets + byte] = True
        return mine

    def view(self, dtype: np.dtype, vector: int) -> np.ndarray:
        key = dtype, vector
        if key not in self._views:
            flat = self._bytes.view(dtype)
            self._views[key] = flat if vector == 1 else flat.reshape(-1, vector)
        return self._views[key]

    def __str__(self) -> str:
        return f"{self.name} [{self.start:#x}, {self.end:#x})"


class Memory:
    """What kernels may touch.

    add(name, array)                    reads and, if the array is writable, stores
    add(name, array, writable=False)    a store to it is a fault
    add(name, array, is_filled=False)   a load of what no kernel has stored is a fault
    The array itself is read and written: nothing is copied. A strided array owns only its elements.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._buffers: list[Buffer] = []

    def add(self, name: str, array: np.ndarray, writable: bool | None = None, is_filled: bool = True) -> int:
        """Registers an array and gives its address."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is no NumPy array")
        if writable and not array.flags.writeable:
            raise ValueError(f"{name} is read-only")
        buffer = Buffer(name, array, array.flags.writeable if writable is None else writable, is_filled)
        place = bisect.bisect_right(self._starts, buffer.start)
        for other in self._buffers[max(place - 1, 0) : place + 1]:
            if buffer.start < other.end and other.start < buffer.end:
                raise ValueError(f"{buffer} overlaps {other}")
        self._starts.insert(place, buffer.start)
        self._buffers.insert(place, buffer)
        return array.ctypes.data

    def remove(self, name: str) -> None:
        kept = [buffer for buffer in self._buffers if buffer.name != name]
        if len(kept) == len(self._buffers):
            raise KeyError(name)
        self._buffers = kept
        self._starts = [buffer.start for buffer in kept]

    def begin(self) -> None:
        """A launch begins: what earlier ones wrote is visible to all of its blocks."""
        for buffer in self._buffers:
            buffer.writer = None

    def find(self, address: int) -> Buffer | None:
        place = bisect.bisect_right(self._starts, address) - 1
        # Empty buffers share their address with others.
        while place >= 0:
            buffer = self._buffers[place]
            if address < buffer.end:
                return buffer
            if buffer.start != buffer.end:
                return None
            place -= 1
        return None

    def nearest(self, address: int) -> str:
        if not self._buffers:
            return "no buffer is registered"
        best = min(self._buffers, key=lambda b: max(b.start - address, address - b.end + 1, 0))
        where = (
            f"{address - best.start} bytes from its start"
            if address >= best.start
            else f"{best.start - address} bytes before"
        )
        return f"nearest buffer: {best}, {where}"


class GlobalSpace:
    """A launch's accesses to Memory, checked and counted."""

    def __init__(self, machine: Any, memory: Memory, constants: Memory) -> None:
        self.machine, self.memory, self.constants = machine, memory, constants

    def _buffers(
        self, site: Any, lanes: Any, addresses: np.ndarray, size: int, is_write: bool
    ) -> list[tuple[Buffer, Any]]:
        """The buffers touched, each with the positions that touch it (None: all)."""
        if np.bitwise_or.reduce(addresses) & (size - 1):
            wrong = int(np.flatnonzero(addresses & (size - 1))[0])
            raise site.fault(Misaligned, lanes, wrong, f"address {int(addresses[wrong]):#x} is no multiple of {size}")
        low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
        buffer = self.memory.find(low) or self.constants.find(low)
        if buffer is not None and high + size <= buffer.end:
            found = [(buffer, None)]
        else:
            found = self._split(site, lanes, addresses, size)
        for buffer, chosen in found:
            own = addresses if chosen is None else addresses[chosen]
            if is_write and not buffer.is_writable:
                self._outside(
                    site,
                    lanes,
                    addresses,
                    0 if chosen is None else int(chosen[0]),
                    f"a store to the read-only {buffer}",
                )
            if buffer.belongs is not None:
                inside = buffer.belongs[_byte_places(buffer, own, size)].all(axis=1)
                if not inside.all():
                    first = int(np.flatnonzero(~inside)[0])
                    wrong = first if chosen is None else int(chosen[first])
                    self._outside(site, lanes, addresses, wrong, f"{size} bytes in a gap of the strided {buffer}")
        return found

    def _split(self, site: Any, lanes: Any, addresses: np.ndarray, size: int) -> list[tuple[Buffer, Any]]:
        groups: dict[int, tuple[Buffer, list[int]]] = {}
        for place, address in enumerate(addresses.tolist()):
            buffer = self.memory.find(address) or self.constants.find(address)
            if buffer is None or address + size > buffer.end:
                self._outside(site, lanes, addresses, place, f"{size} bytes")
            groups.setdefault(id(buffer), (buffer, []))[1].append(place)
        return [(buffer, np.array(places)) for buffer, places in groups.values()]

    def _outside(self, site: Any, lanes: Any, addresses: np.ndarray, place: int, what: str) -> None:
        address = int(addresses[place])
        raise site.fault(MemoryFault, lanes, place, f"{what} at {address:#x}; {self.memory.nearest(address)}")

    def load(
        self,
        site: Any,
        lanes: Any,
        addresses: np.ndarray,
        dtype: np.dtype,
        vector: int,
        is_shared: bool = False,
        is_constant: bool = False,
    ) -> np.ndarray:
        size = dtype.itemsize * vector
        found = self._buffers(site, lanes, addresses, size, False)
        self.machine.statistics.global_access(site, lanes, addresses, size, False)
        result = None
        for buffer, chosen in found:
            own = addresses if chosen is None else addresses[chosen]
            if buffer.filled is not None or buffer.writer is not None:
                self._check_read(site, lanes, chosen, buffer, own, size, is_shared, is_constant)
            values = buffer.view(dtype, vector)[(own - buffer.origin) // size]
            if chosen is None:
                return values
            if result is None:
                result = np.empty((len(addresses), *values.shape[1:]), dtype)
            result[chosen] = values
        return result

    def _check_read(
        self,
        site: Any,
        lanes: Any,
        chosen: Any,
        buffer: Buffer,
        own: np.ndarray,
        size: int,
        is_shared: bool,
        is_constant: bool,
    ) -> None:
        places = _byte_places(buffer, own, size)
        wrong: tuple[np.ndarray, type[Fault], str] | None = None
        if buffer.filled is not None and not buffer.filled[places].all():
            wrong = ~buffer.filled[places], Uninitialized, "is read before anything was stored there"
        elif buffer.writer is not None and not is_shared:
            writer = buffer.writer[places]
            blocks = self.machine.block_of(lanes if chosen is None else (chosen if lanes is None else lanes[chosen]))[
                :, None
            ]
            other = (writer >= 0) & (is_constant | (writer != blocks))
            what = (
                "is loaded as constant (.nc), but this launch stored to it"
                if is_constant
                else "was stored by another block of this launch"
            )
            wrong = other, GlobalRace, what
        if wrong is not None and wrong[0].any():
            first = int(np.flatnonzero(wrong[0].any(axis=1))[0])
            place = first if chosen is None else int(chosen[first])
            raise site.fault(wrong[1], lanes, place, f"address {int(own[first]):#x} of {buffer} {wrong[2]}")

    def store(
        self,
        site: Any,
        lanes: Any,
        addresses: np.ndarray,
        values: np.ndarray,
        dtype: np.dtype,
        vector: int,
        is_shared: bool = False,
    ) -> None:
        size = dtype.itemsize * vector
        found = self._buffers(site, lanes, addresses, size, True)
        self.machine.statistics.global_access(site, lanes, addresses, size, True)
        for buffer, chosen in found:
            own = addresses if chosen is None else addresses[chosen]
            mine = values if chosen is None else values[chosen]
            view, index = buffer.view(dtype, vector), (own - buffer.origin) // size
            old = view[index]
            view[index] = mine
            bits = f"u{dtype.itemsize}"
            # Several threads may store the same value to the same place.
            lost = (view[index].view(bits) != np.ascontiguousarray(mine).view(bits)).reshape(len(index), -1).any(axis=1)
            changed = (old.view(bits) != np.ascontiguousarray(mine).view(bits)).reshape(len(index), -1).any(axis=1)
            blocks = self.machine.block_of(lanes if chosen is None else (chosen if lanes is None else lanes[chosen]))
            if buffer.writer is None:
                buffer.writer = np.full(len(buffer.view(np.dtype("u1"), 1)), -1, np.int32)
            places = _byte_places(buffer, own, size)
            if not is_shared:
                writer = buffer.writer[places]
                lost |= changed & ((writer >= 0) & (writer != blocks[:, None])).any(axis=1)
            if lost.any():
                first = int(np.flatnonzero(lost)[0])
                place = first if chosen is None else int(chosen[first])
                raise site.fault(
                    GlobalRace,
                    lanes,
                    place,
                    f"address {int(own[first]):#x} of {buffer} is stored to by another thread too",
                )
            buffer.writer[places] = blocks[:, None]
            if buffer.filled is not None:
                buffer.filled[places] = True

    def atomic(self, site: Any, lanes: Any, addresses: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """A flat view and the places in it, checked for being read and written."""
        found = self._buffers(site, lanes, addresses, dtype.itemsize, True)
        self.machine.statistics.global_access(site, lanes, addresses, dtype.itemsize, True)
        if len(found) > 1:
            raise site.fault(MemoryFault, lanes, 0, "one atomic touches several buffers")
        buffer = found[0][0]
        return buffer.view(dtype, 1), (addresses - buffer.origin) // dtype.itemsize

    def peek(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The bytes at addresses that were checked before, as rows."""
        rows = np.zeros((len(addresses), size), np.uint8)
        for place, address in enumerate(addresses.tolist()):
            buffer = self.memory.find(address) or self.constants.find(address)
            if buffer is not None:
                begin = address - buffer.origin
                rows[place] = buffer.view(np.dtype("u1"), 1)[begin : begin + size]
        return rows


def _byte_places(buffer: Buffer, addresses: np.ndarray, size: int) -> np.ndarray:
    return (addresses - buffer.origin)[:, None] + np.arange(size)
