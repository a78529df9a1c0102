"""Shared and local memory of the blocks that run together."""

from __future__ import annotations

from typing import Any

import numpy as np

from .faults import MemoryFault, Misaligned, SharedBounds
from .memory import aligned_bytes
from .races import Races

_ROW = 128


class SharedSpace:
    """Every block has its own `stride` bytes; addresses count from the block's first."""

    def __init__(self, machine: Any, arrays: list[tuple[str, int, int]], granule: int) -> None:
        """arrays: name, begin, end."""
        self.machine = machine
        self.arrays = arrays
        self.stride = -(-max([end for _, _, end in arrays], default=0) // _ROW) * _ROW
        total = self.stride * machine.num_blocks
        self._bytes = aligned_bytes(total, _ROW)
        self._granule = granule
        self._views: dict[Any, np.ndarray] = {}
        self.base = np.repeat(np.arange(machine.num_blocks, dtype=np.int64) * self.stride, machine.lanes_per_block)
        self.everyone = np.arange(machine.num_lanes)
        self.reset()

    def reset(self) -> None:
        self._bytes[:] = 0xFF
        self.races = Races(self.machine, len(self._bytes) // self._granule, self._granule)

    def view(self, dtype: np.dtype, vector: int) -> np.ndarray:
        key = dtype, vector
        if key not in self._views:
            flat = self._bytes.view(dtype)
            self._views[key] = flat if vector == 1 else flat.reshape(-1, vector)
        return self._views[key]

    def places(self, site: Any, lanes: Any, addresses: np.ndarray, size: int) -> np.ndarray:
        """Checked bytes in the store of all blocks."""
        if np.bitwise_or.reduce(addresses) & (size - 1):
            wrong = int(np.flatnonzero(addresses & (size - 1))[0])
            raise site.fault(
                Misaligned, lanes, wrong, f"shared address {int(addresses[wrong])} is no multiple of {size}"
            )
        low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
        if not any(begin <= low and high + size <= end for _, begin, end in self.arrays):
            inside = np.zeros(len(addresses), bool)
            for _, begin, end in self.arrays:
                inside |= (addresses >= begin) & (addresses + size <= end)
            if not inside.all():
                wrong = int(np.flatnonzero(~inside)[0])
                known = ", ".join(f"{name} [{begin}, {end})" for name, begin, end in self.arrays) or "none is declared"
                raise site.fault(
                    SharedBounds, lanes, wrong, f"{size} bytes at shared address {int(addresses[wrong])}; {known}"
                )
        return addresses + (self.base if lanes is None else self.base[lanes])

    def load(self, site: Any, lanes: Any, addresses: np.ndarray, dtype: np.dtype, vector: int, **_: bool) -> np.ndarray:
        size = dtype.itemsize * vector
        places = self.places(site, lanes, addresses, size)
        who = self.everyone if lanes is None else lanes
        self.races.read(site, who, self.races.granules(places, size), self.machine.thread[who])
        self.machine.statistics.shared_access(site, lanes, addresses, size, False)
        return self.view(dtype, vector)[places // size]

    def store(
        self, site: Any, lanes: Any, addresses: np.ndarray, values: np.ndarray, dtype: np.dtype, vector: int, **_: bool
    ) -> None:
        size = dtype.itemsize * vector
        places = self.places(site, lanes, addresses, size)
        self.races.write(site, self.everyone if lanes is None else lanes, self.races.granules(places, size))
        self.machine.statistics.shared_access(site, lanes, addresses, size, True)
        self.view(dtype, vector)[places // size] = values

    def atomic(self, site: Any, lanes: Any, addresses: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        places = self.places(site, lanes, addresses, dtype.itemsize)
        who = self.everyone if lanes is None else lanes
        self.races.touch_atomically(site, who, self.races.granules(places, dtype.itemsize))
        return self.view(dtype, 1), places // dtype.itemsize


class LocalSpace:
    """Every thread's own bytes (a stack, or arrays that didn't fit into registers)."""

    def __init__(self, machine: Any, num_bytes: int) -> None:
        self.machine, self.num_bytes = machine, num_bytes
        self.stride = -(-num_bytes // _ROW) * _ROW
        self._bytes = aligned_bytes(self.stride * machine.num_lanes, _ROW)
        self._bytes[:] = 0xFF
        self.base = np.arange(machine.num_lanes, dtype=np.int64) * self.stride

    def _places(self, site: Any, lanes: Any, addresses: np.ndarray, size: int) -> np.ndarray:
        wrong = (addresses < 0) | (addresses + size > self.num_bytes)
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            raise site.fault(
                MemoryFault, lanes, place, f"{size} bytes at local address {int(addresses[place])} of {self.num_bytes}"
            )
        if np.bitwise_or.reduce(addresses) & (size - 1):
            place = int(np.flatnonzero(addresses & (size - 1))[0])
            raise site.fault(
                Misaligned, lanes, place, f"local address {int(addresses[place])} is no multiple of {size}"
            )
        return (addresses + (self.base if lanes is None else self.base[lanes])) // size

    def _view(self, dtype: np.dtype, vector: int) -> np.ndarray:
        flat = self._bytes.view(dtype)
        return flat if vector == 1 else flat.reshape(-1, vector)

    def load(self, site: Any, lanes: Any, addresses: np.ndarray, dtype: np.dtype, vector: int, **_: bool) -> np.ndarray:
        size = dtype.itemsize * vector
        self.machine.statistics.local_access(len(addresses) * size, False)
        return self._view(dtype, vector)[self._places(site, lanes, addresses, size)]

    def store(
        self, site: Any, lanes: Any, addresses: np.ndarray, values: np.ndarray, dtype: np.dtype, vector: int, **_: bool
    ) -> None:
        size = dtype.itemsize * vector
        self.machine.statistics.local_access(len(addresses) * size, True)
        self._view(dtype, vector)[self._places(site, lanes, addresses, size)] = values

    def atomic(self, site: Any, lanes: Any, addresses: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        return self._view(dtype, 1), self._places(site, lanes, addresses, dtype.itemsize)
