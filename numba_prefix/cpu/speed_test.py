"""Speed of instruction-set paths on this machine, measured once per dtype and kept on disk.

A CPU's features are no ground for a choice: vdpbf16ps makes bfloat16 prefill 1.5 times slower than
float32 multiply-adds on an Emerald Rapids, and other CPUs do it at twice the rate.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from numba_prefix.cpu.compile.cache import origin
from numba_prefix.cpu.paths import Path
from numba_prefix.cpu.self_test import Case, random_case
from numba_prefix.cpu.simd.features import cpu_name, features
from numba_prefix.runtime import disk_cache

# A prefill of some milliseconds, whose keys fit an L2 cache. Decode is the same code on all paths.
Q_LEN, KV_LEN, HEAD_SIZE, BLOCK_SIZE = 128, 1024, 128, 64
FLOPS = 4 * HEAD_SIZE * (Q_LEN * (KV_LEN - Q_LEN) + Q_LEN * (Q_LEN + 1) // 2)
ROUNDS = 9  # of all paths in turns: neighbours on the machine slow each of them alike
# The last of the paths has to be so much slower than another: a choice is not to change with noise.
MARGIN = 1.05
NAME = "fastest_path"  # of the files on disk

Seconds = Mapping[str, float]  # by the name of a path: the least of all rounds


def fastest(seconds: Seconds, paths: Sequence[Path]) -> Path:
    """The fastest of `paths`, which come with the simplest last; that one unless it is slower than
    another by MARGIN."""
    best, simplest = min(paths, key=lambda path: seconds[path.name]), paths[-1]
    return best if seconds[best.name] * MARGIN < seconds[simplest.name] else simplest


def measure(
    dtype: str,
    paths: Sequence[Path],
    prepare: Callable[[Path, Case], Callable[[], None]],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Times a problem on each path. prepare: what runs it, on one thread, any number of times."""
    case = random_case(dtype, Q_LEN, KV_LEN, HEAD_SIZE, BLOCK_SIZE)
    runs = {path.name: prepare(path, case) for path in paths}
    seconds = dict.fromkeys(runs, float("inf"))
    for run in runs.values():  # the first touches memory that later ones find in the cache
        run()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = clock()
            run()
            seconds[name] = min(seconds[name], clock() - began)
    return seconds


def load(dtype: str, paths: Sequence[Path]) -> dict[str, float] | None:
    """Kept seconds of exactly these paths; None if there are none to be trusted."""
    try:
        seconds = json.loads(disk_cache.load(NAME, _key(dtype, paths)) or b"null")
    except Exception:  # no JSON, or no sources to be keyed by
        return None
    names = [path.name for path in paths]
    if not isinstance(seconds, dict) or sorted(seconds) != sorted(names):
        return None
    is_sound = all(type(value) is float and 0 < value < np.inf for value in seconds.values())
    return seconds if is_sound else None


def save(dtype: str, paths: Sequence[Path], seconds: Seconds) -> None:
    """Keep seconds for later processes, as far as there are room and permission."""
    with contextlib.suppress(Exception):  # no sources to be keyed by
        disk_cache.save(NAME, _key(dtype, paths), json.dumps(dict(seconds)).encode())


def _key(dtype: str, paths: Sequence[Path]) -> bytes:
    """Everything that compiled code is keyed by, and the paths that were measured."""
    names = [path.name for path in paths]
    return repr((*origin(), NAME, dtype, names, cpu_name(), sorted(features()))).encode()


def summary(seconds: Seconds) -> str:
    """Measured speeds in words."""
    return ", ".join(f"{name} {FLOPS / value / 1e9:.0f}" for name, value in seconds.items()) + " GFLOP/s"
