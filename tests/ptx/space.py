"""A launch's accesses to global memory, checked and counted."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from .faults import Fault, GlobalRace, MemoryFault, Misaligned, Uninitialized
from .memory import Memory, Region

_BYTE = np.dtype("u1")
# Positions among a request's addresses; None: all of them.
Chosen = Any


class GlobalSpace:
    def __init__(self, machine: Any, memory: Memory, constants: Memory) -> None:
        self.machine, self.memory, self.constants = machine, memory, constants

    def find(self, address: int) -> Region | None:
        return self.memory.find(address) or self.constants.find(address)

    def _regions(
        self, site: Any, lanes: Any, addresses: np.ndarray, size: int, is_write: bool
    ) -> list[tuple[Region, Chosen]]:
        low, high = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))
        region = self.find(low)
        if region is not None and high + size <= region.end:
            found: list[tuple[Region, Chosen]] = [(region, None)]
        else:
            found = self._split(site, lanes, addresses, size)
        for region, chosen in found:
            allowed = region.writable if is_write else region.readable
            if allowed is not None:
                own = addresses if chosen is None else addresses[chosen]
                inside = allowed[region.places(own, size)].all(axis=1)
                if not inside.all():
                    first = int(np.flatnonzero(~inside)[0])
                    self._outside(site, lanes, addresses, first if chosen is None else int(chosen[first]), size)
            elif is_write and not region.is_writable:
                self._outside(
                    site, lanes, addresses, 0 if chosen is None else int(chosen[0]), size, "a store to read-only "
                )
        return found

    def check_alignment(self, site: Any, lanes: Any, addresses: np.ndarray, size: int) -> None:
        if np.bitwise_or.reduce(addresses) & (size - 1):
            wrong = int(np.flatnonzero(addresses & (size - 1))[0])
            what = f"address {int(addresses[wrong]):#x} is no multiple of {size}"
            raise site.fault(Misaligned, lanes, wrong, what)

    def _split(self, site: Any, lanes: Any, addresses: np.ndarray, size: int) -> list[tuple[Region, Chosen]]:
        groups: dict[int, tuple[Region, list[int]]] = {}
        for place, address in enumerate(addresses.tolist()):
            region = self.find(address)
            if region is None or address + size > region.end:
                self._outside(site, lanes, addresses, place, size)
            groups.setdefault(id(region), (region, []))[1].append(place)
        return [(region, np.array(places)) for region, places in groups.values()]

    def _outside(self, site: Any, lanes: Any, addresses: np.ndarray, place: int, size: int, what: str = "") -> NoReturn:
        address = int(addresses[place])
        raise site.fault(
            MemoryFault, lanes, place, f"{what}{size} bytes at {address:#x}; {self.memory.nearest(address)}"
        )

    def _blocks(self, lanes: Any, chosen: Chosen) -> np.ndarray:
        own = lanes if chosen is None else (chosen if lanes is None else lanes[chosen])
        return self.machine.block_of(own)[:, None]

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
        """is_shared: a load that other blocks may race with (volatile, relaxed); is_constant:
        .nc."""
        size = dtype.itemsize * vector
        self.check_alignment(site, lanes, addresses, size)
        found = self._regions(site, lanes, addresses, size, False)
        self.machine.statistics.global_access(site, lanes, addresses, size, False)
        result = np.empty(0)
        for region, chosen in found:
            own = addresses if chosen is None else addresses[chosen]
            if region.filled is not None or (region.writer is not None and not is_shared):
                self._check_load(site, lanes, chosen, region, region.places(own, size), is_shared, is_constant)
            values = region.view(dtype, vector)[(own - region.origin) // size]
            if chosen is None:
                return values
            if not result.size:
                result = np.empty((len(addresses), *values.shape[1:]), dtype)
            result[chosen] = values
        return result

    def _check_load(
        self,
        site: Any,
        lanes: Any,
        chosen: Chosen,
        region: Region,
        places: np.ndarray,
        is_shared: bool,
        is_constant: bool,
    ) -> None:
        if region.filled is not None:
            self._judge(
                site,
                lanes,
                chosen,
                region,
                places,
                ~region.filled[places],
                Uninitialized,
                "is read before it was written",
            )
        if region.writer is not None and not is_shared:
            writer = region.writer[places]
            other = (writer >= 0) & (is_constant | (writer != self._blocks(lanes, chosen)))
            what = "is loaded as constant (.nc), but stored" if is_constant else "was stored by another block"
            self._judge(site, lanes, chosen, region, places, other, GlobalRace, f"{what} in this launch")

    def _judge(
        self,
        site: Any,
        lanes: Any,
        chosen: Chosen,
        region: Region,
        places: np.ndarray,
        wrong: np.ndarray,
        kind: type[Fault],
        what: str,
    ) -> None:
        if not wrong.any():
            return
        row, byte = np.argwhere(wrong)[0]
        address = region.origin + int(places[row, byte])
        raise site.fault(
            kind, lanes, int(row if chosen is None else chosen[row]), f"address {address:#x} of {region} {what}"
        )

    def store(
        self,
        site: Any,
        lanes: Any,
        addresses: np.ndarray,
        values: np.ndarray,
        dtype: np.dtype,
        vector: int,
        is_shared: bool = False,
        is_constant: bool = False,
    ) -> None:
        size = dtype.itemsize * vector
        self.check_alignment(site, lanes, addresses, size)
        found = self._regions(site, lanes, addresses, size, True)
        self.machine.statistics.global_access(site, lanes, addresses, size, True)
        for region, chosen in found:
            own = addresses if chosen is None else addresses[chosen]
            mine = np.ascontiguousarray(values if chosen is None else values[chosen])
            rows = mine.view(_BYTE).reshape(len(own), size)
            places = region.places(own, size)
            writer, blocks = self._writer(region), self._blocks(lanes, chosen)
            # Several threads may store the same value to the same place.
            other = (writer[places] >= 0) & (writer[places] != blocks) & (region.bytes[places] != rows)
            region.view(dtype, vector)[(own - region.origin) // size] = mine
            if not is_shared:
                lost = other | (region.bytes[places] != rows)
                self._judge(site, lanes, chosen, region, places, lost, GlobalRace, "is stored to by another thread too")
            writer[places] = blocks
            if region.filled is not None:
                region.filled[places] = True

    def _writer(self, region: Region) -> np.ndarray:
        if region.writer is None:
            region.writer = np.full(len(region.bytes), -1, np.int32)
        return region.writer

    def atomic(self, site: Any, lanes: Any, addresses: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """A flat view and the places in it, checked for being read and written."""
        size = dtype.itemsize
        self.check_alignment(site, lanes, addresses, size)
        found = self._regions(site, lanes, addresses, size, True)
        self.machine.statistics.global_access(site, lanes, addresses, size, True)
        if len(found) > 1:
            raise site.fault(MemoryFault, lanes, 0, "one atomic touches several arrays, which is not interpreted")
        region = found[0][0]
        places = region.places(addresses, size)
        if region.filled is not None:
            self._check_load(site, lanes, None, region, places, True, False)
        return region.view(dtype, 1), (addresses - region.origin) // size

    def load_bytes(self, site: Any, lanes: Any, addresses: np.ndarray, count: int) -> np.ndarray:
        """Rows of any number of bytes from anywhere."""
        for region, chosen in self._regions(site, lanes, addresses, count, False):
            places = region.places(addresses if chosen is None else addresses[chosen], count)
            self._check_load(site, lanes, chosen, region, places, False, False)
        self.machine.statistics.global_access(site, lanes, addresses, count, False)
        return self.peek(addresses, count)

    def peek(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """What is at addresses that were checked before, as rows of bytes; nothing is checked or
        counted."""
        rows = np.empty((len(addresses), size), np.uint8)
        left = np.arange(len(addresses))
        while len(left):
            own = addresses[left]
            region = self.find(int(own[0]))
            assert region is not None
            inside = (own >= region.start) & (own < region.end)
            chosen = left[inside]
            rows[chosen] = region.bytes[np.minimum(region.places(own[inside], size), len(region.bytes) - 1)]
            left = left[~inside]
        return rows
