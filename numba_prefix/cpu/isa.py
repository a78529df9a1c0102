"""Choice of the instruction-set path that a dtype takes here. Imports Numba only when asked what
the machine has."""

from __future__ import annotations

import functools
import os

from numba_prefix.cpu.paths import PATHS, Path, by_name

VARIABLE = "NUMBA_PREFIX_ISA"


def candidates(dtype: str) -> tuple[Path, ...]:
    """The paths that a dtype may take here, those of more special instructions first. Where a path
    is forced: the first that the dtype can take from there on, alone. Raises as forced_path does.
    """
    forced = forced_path()
    usable = _usable_from(forced or PATHS[0], dtype, len(_wrong))
    return usable[:1] if forced is not None else usable


@functools.cache
def _usable_from(first: Path, dtype: str, num_wrong: int) -> tuple[Path, ...]:
    """num_wrong: paths given up so far. Only a part of the cache's key: giving one up invalidates
    earlier answers."""
    return tuple(path for path in PATHS[PATHS.index(first) :] if dtype in path.dtypes and not obstacle(path))


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
    """The reason that a path cannot be used; "" if it can."""
    return _wrong.get(path, "") or _missing(path)


def give_up(path: Path, reason: str) -> None:
    """Let no further call take a path."""
    _wrong[path] = reason


_wrong: dict[Path, str] = {}


@functools.cache
def _missing(path: Path) -> str:
    return path.missing()
