"""What a launch did: instructions, bank conflicts and memory traffic."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SECTOR, BANKS = 32, 32


@dataclass
class Traffic:
    """Requests of one PTX line to global memory: 32-byte sectors touched, the fewest that hold the
    distinct bytes, all bytes."""

    sectors: int = 0
    least_sectors: int = 0
    num_bytes: int = 0


@dataclass
class Statistics:
    """All counts are of warps: an instruction that a part of a warp executes counts once.

    instructions     by opcode
    lines            executions by PTX line
    wavefronts       by PTX line: passes through shared memory's 32 banks
    bank_conflicts   by PTX line: wavefronts over the fewest possible
    reads, writes    by PTX line: global memory
    num_bytes        by direction, e.g. "shared read"
    """

    instructions: Counter[str] = field(default_factory=Counter)
    lines: Counter[int] = field(default_factory=Counter)
    wavefronts: Counter[int] = field(default_factory=Counter)
    bank_conflicts: Counter[int] = field(default_factory=Counter)
    reads: dict[int, Traffic] = field(default_factory=dict)
    writes: dict[int, Traffic] = field(default_factory=dict)
    num_bytes: Counter[str] = field(default_factory=Counter)
    _known: dict[Any, tuple[int, int]] = field(default_factory=dict, repr=False)

    @property
    def num_instructions(self) -> int:
        return sum(self.instructions.values())

    @property
    def sectors_read(self) -> int:
        return sum(traffic.sectors for traffic in self.reads.values())

    @property
    def sectors_written(self) -> int:
        return sum(traffic.sectors for traffic in self.writes.values())

    @property
    def least_sectors_read(self) -> int:
        return sum(traffic.least_sectors for traffic in self.reads.values())

    @property
    def least_sectors_written(self) -> int:
        return sum(traffic.least_sectors for traffic in self.writes.values())

    def add(self, other: Statistics) -> None:
        """Counts another launch in."""
        for name in ("instructions", "lines", "wavefronts", "bank_conflicts", "num_bytes"):
            getattr(self, name).update(getattr(other, name))
        for mine, theirs in ((self.reads, other.reads), (self.writes, other.writes)):
            for line, traffic in theirs.items():
                own = mine.setdefault(line, Traffic())
                own.sectors += traffic.sectors
                own.least_sectors += traffic.least_sectors
                own.num_bytes += traffic.num_bytes

    def global_access(self, site: Any, lanes: Any, addresses: np.ndarray, size: int, is_write: bool) -> None:
        by_warp = np.sort(_by_warp(site.machine, lanes, addresses), axis=1)
        before = np.empty_like(by_warp)
        before[:, 0] = -1
        before[:, 1:] = by_warp[:, :-1]
        distinct = np.count_nonzero(by_warp != before, axis=1) * size
        sectors = int(np.count_nonzero(by_warp // SECTOR != before // SECTOR))
        traffic = (self.writes if is_write else self.reads).setdefault(site.line, Traffic())
        traffic.sectors += sectors
        traffic.least_sectors += int(-(-distinct // SECTOR).sum())
        traffic.num_bytes += len(addresses) * size
        self.num_bytes["global written" if is_write else "global read"] += len(addresses) * size

    def shared_access(self, site: Any, lanes: Any, addresses: np.ndarray, size: int, is_write: bool) -> None:
        self.num_bytes["shared written" if is_write else "shared read"] += len(addresses) * size
        relative = addresses - (int(addresses[0]) & ~127)
        key = size, None if lanes is None else lanes.tobytes(), relative.tobytes()
        if key not in self._known:
            phase = {8: 16, 16: 8}.get(size, 32)
            offset = 0 if lanes is None else -int(np.minimum.reduce(relative)) // 128 * 128 + 128
            rows = (
                _by_warp(site.machine, lanes, relative + offset).reshape(-1, phase)
                if lanes is not None
                else relative.reshape(-1, phase)
            )
            self._known[key] = _wavefronts(rows if lanes is not None else rows - _floor(rows), size)
        self._count(site, key)

    def matrix_access(self, site: Any, addresses: np.ndarray, is_write: bool) -> None:
        """ldmatrix and stmatrix: 8 rows of 16 bytes at a time."""
        self.num_bytes["shared written" if is_write else "shared read"] += len(addresses) * 16
        relative = addresses - (int(addresses[0]) & ~127)
        key = "matrix", relative.tobytes()
        if key not in self._known:
            self._known[key] = _wavefronts((relative - _floor(relative)).reshape(-1, 8), 16)
        self._count(site, key)

    def _count(self, site: Any, key: Any) -> None:
        total, least = self._known[key]
        self.wavefronts[site.line] += total
        if total > least:
            self.bank_conflicts[site.line] += total - least

    def local_access(self, num_bytes: int, is_write: bool) -> None:
        self.num_bytes["local written" if is_write else "local read"] += num_bytes


def _floor(addresses: np.ndarray) -> int:
    return int(addresses.min()) // 128 * 128


def _by_warp(machine: Any, lanes: Any, addresses: np.ndarray) -> np.ndarray:
    """[warp, 32] addresses; -1 where a lane takes no part."""
    if lanes is None:
        return addresses.reshape(-1, 32)
    spread = np.full(machine.num_lanes, -1, np.int64)
    spread[lanes] = addresses
    return spread.reshape(-1, 32)


def _wavefronts(addresses: np.ndarray, size: int) -> tuple[int, int]:
    """Passes needed by phases [phase, lane] of addresses (-1: none), and one for each phase that
    does anything."""
    words = addresses >> 2
    if size > 4:
        words = np.where(words[..., None] < 0, -1, words[..., None] + np.arange(size // 4)).reshape(len(words), -1)
    words = np.sort(words, axis=1)
    is_new = np.ones(words.shape, bool)
    is_new[:, 1:] = words[:, 1:] != words[:, :-1]
    is_new &= words >= 0
    phase, _ = np.nonzero(is_new)
    used = np.bincount(phase * BANKS + words[is_new] % BANKS, minlength=len(words) * BANKS)
    passes = used.reshape(-1, BANKS).max(axis=1)
    return int(passes.sum()), int(np.count_nonzero(passes))
