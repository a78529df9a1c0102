"""Choice of the instruction-set path that a dtype takes here. Imports Numba only when asked what
the machine has."""

from __future__ import annotations

import functools
import os

from numba_prefix.cpu.paths import PATHS, Path, by_name

VARIABLE = "NUMBA_PREFIX_ISA"


def path_of(dtype: str) -> Path:
    """The path that a call takes: the best one for its dtype, from the forced one on. Raises as
    forced_path does."""
    return _best_from(forced_path() or PATHS[0], dtype, len(_wrong))


@functools.cache
def _best_from(first: Path, dtype: str, num_wrong: int) -> Path:
    """num_wrong: paths given up so far. Only a part of the cache's key: giving one up invalidates
    earlier answers."""
    candidates = PATHS[PATHS.index(first) :]
    return next(path for path in candidates if dtype in path.dtypes and not obstacle(path))


def forced_path() -> Path | None:
    """The path that NUMBA_PREFIX_ISA names, or None. Raises ValueError if that is no path, or one
    that cannot be used here."""
    forced = os.environ.get(VARIABLE, "").strip()
    if not forced:
        return None
    try:
        path = by_name(forced)
        why = obstacle(path)
    except ValueError:
        why = "it is none"
    if why:
        usable = ", ".join(path.name for path in PATHS if not obstacle(path))
        raise ValueError(f"{VARIABLE}: got {forced[:40]!r} ({why}), expected one of {usable}")
    return path


def obstacle(path: Path) -> str:
    """Why a path cannot be used; "" if it can."""
    return _wrong.get(path, "") or _missing(path)


def give_up(path: Path, reason: str) -> None:
    """Let no further call take a path."""
    _wrong[path] = reason


_wrong: dict[Path, str] = {}


@functools.cache
def _missing(path: Path) -> str:
    return path.missing()
