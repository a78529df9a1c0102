"""Who touched which shared bytes when, and what orders it: a happens-before check.

Time counts synchronisations of the whole machine. `clock[warp, other]` is the time up to which what
the warp `other` (of the same block) did is ordered before what `warp` does now; for a warp itself
it is the time of its last warp-wide synchronisation, which orders its lanes (one of a part of a
warp orders nothing). An access is in order if its predecessors' times are not later than that, or
if the same thread made them. Bytes are tracked in granules as large as the kernel's smallest access
to shared memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .faults import InFlight, SharedRace, Uninitialized

NEVER, LANDING = -1, -2  # LANDING - thread: that thread's cp.async has not landed
MANY = -3
_FOREVER = np.int32(2**31 - 1)


class Races:
    def __init__(self, machine: Any, num_granules: int, granule: int) -> None:
        self.machine, self.granule, self.warps = machine, granule, machine.warps_per_block
        self.writer = np.full(num_granules, NEVER, np.int32)
        self.write_time = np.zeros(num_granules, np.int32)
        self.read_time = np.zeros((num_granules, self.warps), np.int32)
        self.reader = np.full((num_granules, self.warps), MANY, np.int32)
        self.clock = np.zeros((machine.num_blocks * self.warps, self.warps), np.int32)
        self.clock[machine.num_live_blocks * self.warps :] = _FOREVER
        self.time, self.floor, self.last_read = 1, 0, 0
        self._log: list[tuple[np.ndarray, np.ndarray, np.ndarray, int]] = []

    def granules(self, places: np.ndarray, size: int) -> np.ndarray:
        first = places // self.granule
        count = size // self.granule
        return first[:, None] + np.arange(count) if count > 1 else first[:, None]

    def read(self, site: Any, lanes: np.ndarray, granules: np.ndarray, threads: np.ndarray) -> None:
        """threads: those that read (MANY: all of the lane's warp)."""
        writer = self.writer[granules]
        if np.minimum.reduce(writer, axis=None) < 0:
            self._unready(site, lanes, granules, writer)
        self._after_write(site, lanes, granules, writer, threads, "read")
        self._log.append((granules, lanes, threads, self.time))

    def write(self, site: Any, lanes: np.ndarray, granules: np.ndarray, in_flight: bool = False) -> None:
        threads = self.machine.thread[lanes]
        writer = self.writer[granules]
        if np.minimum.reduce(writer, axis=None) < NEVER:
            self._unready(site, lanes, granules, writer)
        self._after_write(site, lanes, granules, writer, threads, "written")
        self._after_reads(site, lanes, granules, threads)
        marks = (LANDING - threads if in_flight else threads)[:, None]
        self.writer[granules] = marks
        self.write_time[granules] = self.time
        lost = self.writer[granules] != marks
        if lost.any():
            row, column = np.argwhere(lost)[0]
            other = self.writer[granules[row, column]]
            self._race(site, lanes, granules, lost, f"is written, also by thread {int(other)}")

    def land(self, lanes: np.ndarray, granules: np.ndarray) -> None:
        self.writer[granules] = self.machine.thread[lanes][:, None]
        self.write_time[granules] = self.time

    def touch_atomically(self, site: Any, lanes: np.ndarray, granules: np.ndarray) -> None:
        """Atomics don't race with each other; their marks say "written by MANY at no time", so
        others need a barrier."""
        writer = self.writer[granules]
        if np.minimum.reduce(writer, axis=None) < 0:
            self._unready(site, lanes, granules, writer)
        threads = self.machine.thread[lanes]
        ordinary = self.atomic_time[granules] != self.write_time[granules]
        self._after_write(
            site, lanes, granules, np.where(ordinary, writer, threads[:, None]), threads, "touched atomically"
        )
        self._after_reads(site, lanes, granules, threads)
        self.writer[granules] = threads[:, None]
        self.write_time[granules] = self.atomic_time[granules] = self.time

    @property
    def atomic_time(self) -> np.ndarray:
        if not hasattr(self, "_atomic_time"):
            self._atomic_time = np.full(len(self.writer), -1, np.int32)
        return self._atomic_time

    def _after_write(
        self, site: Any, lanes: np.ndarray, granules: np.ndarray, writer: np.ndarray, threads: np.ndarray, what: str
    ) -> None:
        time = self.write_time[granules]
        if np.maximum.reduce(time, axis=None) <= self.floor:
            return
        rows = self.machine.warp[lanes][:, None]
        late = (time > self.clock[rows, np.maximum(writer, 0) >> 5]) & (writer != threads[:, None])
        if late.any():
            place = np.argwhere(late)[0]
            self._race(site, lanes, granules, late, f"is {what}, thread {writer[tuple(place)]} wrote it")

    def _after_reads(self, site: Any, lanes: np.ndarray, granules: np.ndarray, threads: np.ndarray) -> None:
        self._settle()
        if self.last_read <= self.floor:
            return
        rows = self.machine.warp[lanes]
        late = self.read_time[granules] > self.clock[rows][:, None, :]
        if not late.any():
            return
        own = (rows % self.warps)[:, None, None] == np.arange(self.warps)
        late &= ~(own & (self.reader[granules] == threads[:, None, None]))
        if late.any():
            warp = int(np.argwhere(late)[0][2])
            self._race(site, lanes, granules, late.any(axis=2), f"is written, a thread of warp {warp} read it")

    def _settle(self) -> None:
        """Notes the reads made since the last store that are not ordered before everything by
        now."""
        log = [entry for entry in self._log if entry[3] > self.floor]
        self._log.clear()
        if not log:
            return
        granules = np.concatenate([entry[0].reshape(-1) for entry in log])
        lanes = np.concatenate([np.repeat(entry[1], entry[0].shape[1]) for entry in log])
        threads = np.concatenate([np.repeat(entry[2], entry[0].shape[1]) for entry in log])
        time = np.concatenate([np.full(entry[0].size, entry[3], np.int32) for entry in log])
        rows = self.machine.warp[lanes]
        columns = rows % self.warps
        own_clock = self.clock[rows, columns]
        is_unordered = time > own_clock
        before = np.where(self.read_time[granules, columns] > own_clock, self.reader[granules, columns], threads)
        self.read_time[granules, columns] = time
        late = np.flatnonzero(is_unordered)
        granules, columns, threads, before = granules[late], columns[late], threads[late], before[late]
        self.reader[granules, columns] = threads
        several = (self.reader[granules, columns] != threads) | (before != threads)
        self.reader[granules[several], columns[several]] = MANY
        self.last_read = log[-1][3]

    def order_block(self, block: int, warps: np.ndarray) -> None:
        """A barrier of these warps (numbers inside the block)."""
        rows = block * self.warps + warps
        joined = self.clock[rows].max(axis=0)
        joined[warps] = self.time
        self.clock[rows] = joined
        self.time += 1
        self.floor = int(self.clock.min())

    def order_warps(self, rows: np.ndarray) -> None:
        """Warps (numbers in the machine) whose lanes are ordered now."""
        self.clock[rows, rows % self.warps] = self.time
        self.time += 1
        if self.warps == 1:
            self.floor = int(self.clock.min())

    def _address(self, granule: int) -> int:
        return granule * self.granule % self.machine.shared.stride

    def _race(self, site: Any, lanes: np.ndarray, granules: np.ndarray, wrong: np.ndarray, what: str) -> None:
        row, column = np.argwhere(wrong)[0]
        address = self._address(int(granules[row, column]))
        raise site.fault(SharedRace, lanes, int(row), f"shared byte {address} {what}, with nothing that orders the two")

    def _unready(self, site: Any, lanes: np.ndarray, granules: np.ndarray, writer: np.ndarray) -> None:
        landing = np.argwhere(writer <= LANDING)
        row, column = landing[0] if len(landing) else np.argwhere(writer < 0)[0]
        address = self._address(int(granules[row, column]))
        if len(landing):
            owner = LANDING - int(writer[row, column])
            raise site.fault(
                InFlight,
                lanes,
                int(row),
                f"shared byte {address} is touched while thread {owner}'s cp.async is in flight",
            )
        raise site.fault(Uninitialized, lanes, int(row), f"shared byte {address} is read before it was written")
