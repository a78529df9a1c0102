"""Device memory: named arrays at the addresses that they have in NumPy, and nothing else."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

ROW = 32  # bytes: no access is wider, and views begin at a multiple
_ALIGNMENT = 256  # of what a GPU's allocator gives


@dataclass
class _Part:
    name: str
    array: np.ndarray
    is_writable: bool
    filled: np.ndarray | None  # by byte of its extent; None: everything is
    start: int
    end: int

    def offsets(self) -> np.ndarray:
        """Of every byte of the array from its extent's start."""
        array = self.array
        offsets = np.array([array.ctypes.data - self.start])
        for size, stride in zip(array.shape, array.strides, strict=True):
            offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
        return (offsets[:, None] + np.arange(array.itemsize)).reshape(-1)

    @property
    def is_dense(self) -> bool:
        return self.array.nbytes == self.end - self.start


class Region:
    """Arrays whose extents overlap (two caches that are views of one array, say), or one alone."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = parts
        self.start, self.end = min(part.start for part in parts), max(part.end for part in parts)
        self.origin = self.start // ROW * ROW
        length = -(-(self.end - self.origin) // ROW) * ROW
        self.bytes = np.frombuffer((ctypes.c_uint8 * length).from_address(self.origin), np.uint8)
        self.writer: np.ndarray | None = None  # by byte: the block that wrote it in this launch
        self._views: dict[Any, np.ndarray] = {}
        # By byte; None: all are.
        self.readable: np.ndarray | None = None
        self.writable: np.ndarray | None = None
        self.filled: np.ndarray | None = None
        first = parts[0]
        self.is_writable = first.is_writable
        if len(parts) == 1 and first.is_dense:
            if first.filled is not None:
                self.filled = np.ones(length, bool)
                self.filled[self.start - self.origin : self.end - self.origin] = first.filled
            return
        self.readable, self.writable = np.zeros(length, bool), np.zeros(length, bool)
        filled = np.ones(length, bool)
        for part in parts:
            places = part.offsets() + (part.start - self.origin)
            self.readable[places] = True
            self.writable[places] |= part.is_writable
            if part.filled is not None:
                filled[places] &= part.filled[part.offsets()]
        self.filled = None if filled.all() else filled
        self.is_writable = any(part.is_writable for part in parts)

    def view(self, dtype: np.dtype, vector: int) -> np.ndarray:
        key = dtype, vector
        if key not in self._views:
            flat = self.bytes.view(dtype)
            self._views[key] = flat if vector == 1 else flat.reshape(-1, vector)
        return self._views[key]

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """[access, byte]: where in the bytes."""
        return (addresses - self.origin)[:, None] + np.arange(size)

    def __str__(self) -> str:
        return " + ".join(f"{part.name} [{part.start:#x}, {part.end:#x})" for part in self.parts)


class Memory:
    """What kernels may touch.

    add(name, array)                    reads and, if the array is writable, stores
    add(name, array, writable=False)    a store to it is a fault
    add(name, array, is_filled=False)   a load of what no kernel has stored is a fault
    zeros(name, shape, dtype)           adds a new array, aligned as a GPU's allocator would
    The array itself is read and written: nothing is copied. A strided array owns only its elements.
    """

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._regions: list[Region] | None = None
        self._starts: list[int] = []

    def add(self, name: str, array: np.ndarray, writable: bool | None = None, is_filled: bool = True) -> int:
        """Registers an array and gives its address."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is no NumPy array")
        if writable and not array.flags.writeable:
            raise ValueError(f"{name} is read-only")
        bounds = np.lib.array_utils.byte_bounds if hasattr(np.lib, "array_utils") else np.byte_bounds
        start, end = (int(bound) for bound in bounds(array)) if array.size else (array.ctypes.data,) * 2
        is_writable = array.flags.writeable if writable is None else writable
        filled = None if is_filled else np.zeros(end - start, bool)
        self._forget_regions()
        self._parts.append(_Part(name, array, is_writable, filled, start, end))
        return array.ctypes.data

    def zeros(self, name: str, shape: Any, dtype: Any, is_filled: bool = True) -> np.ndarray:
        dtype = np.dtype(dtype)
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        array = aligned_bytes(num_bytes, _ALIGNMENT)
        array[:] = 0
        typed = array.view(dtype).reshape(shape)
        self.add(name, typed, is_filled=is_filled)
        return typed

    def remove(self, name: str) -> None:
        kept = [part for part in self._parts if part.name != name]
        if len(kept) == len(self._parts):
            raise KeyError(name)
        self._forget_regions()
        self._parts = kept

    def _forget_regions(self) -> None:
        for region in self._regions or []:
            for part in region.parts:
                if region.filled is not None:
                    part.filled = region.filled[part.start - region.origin : part.end - region.origin].copy()
        self._regions = None

    def begin(self) -> None:
        """A launch begins: what earlier ones wrote is visible to all of its blocks."""
        for region in self._all():
            region.writer = None

    def _all(self) -> list[Region]:
        if self._regions is None:
            groups: list[list[_Part]] = []
            end = -1
            for part in sorted((part for part in self._parts if part.start < part.end), key=lambda part: part.start):
                if part.start < end:
                    groups[-1].append(part)
                else:
                    groups.append([part])
                end = max(end, part.end)
            self._regions = [Region(group) for group in groups]
            self._starts = [region.start for region in self._regions]
        return self._regions

    def find(self, address: int) -> Region | None:
        regions = self._all()
        place = bisect.bisect_right(self._starts, address) - 1
        return regions[place] if place >= 0 and address < regions[place].end else None

    def nearest(self, address: int) -> str:
        regions = self._all()
        if not regions:
            return "no array is registered"
        best = min(regions, key=lambda r: max(r.start - address, address - r.end + 1, 0))
        if address < best.start:
            return f"the nearest is {best}, {best.start - address} bytes after"
        where = "inside" if address < best.end else f"{address - best.end} bytes past its end"
        return f"the nearest is {best}, byte {address - best.start} of it, {where}"


def aligned_bytes(num_bytes: int, alignment: int) -> np.ndarray:
    raw = np.empty(num_bytes + alignment, np.uint8)
    skip = -raw.ctypes.data % alignment
    return raw[skip : skip + num_bytes]
