"""Instruction-set paths of the CPU target: which ones this process may use, and which one a dtype takes. Imports Numba only
when asked for either.

    amx          bfloat16 and float16 on AMX's tiles
    avx512_bf16  bfloat16 by vdpbf16ps
    vector       every dtype, by multiply-adds on any CPU
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys

VARIABLE = "NUMBA_PREFIX_ISA"
AMX, AVX512_BF16, VECTOR = PATHS = ("amx", "avx512_bf16", "vector")  # the best first
DTYPES = {AMX: ("bfloat16", "float16"), AVX512_BF16: ("bfloat16",), VECTOR: ("bfloat16", "float16", "float32")}

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def path_of(dtype: str) -> str:
    """The path that a call takes: the best one for its dtype, from the forced one on. Raises as forced_path does."""
    return _best_from(forced_path() or PATHS[0], dtype, len(_wrong))


@functools.cache
def _best_from(first: str, dtype: str, num_wrong: int) -> str:
    """num_wrong: paths given up so far; an answer from before, however late it is remembered, is to no later question."""
    candidates = PATHS[PATHS.index(first) :]
    return next(path for path in candidates if dtype in DTYPES[path] and not obstacle(path))


def forced_path() -> str:
    """What NUMBA_PREFIX_ISA names; "" for nothing. Raises ValueError if that is no path, or one that cannot be used here."""
    forced = os.environ.get(VARIABLE, "").strip()
    if not forced:
        return ""
    why = obstacle(forced) if forced in PATHS else "it is none"
    if why:
        usable = ", ".join(path for path in PATHS if not obstacle(path))
        raise ValueError(f"{VARIABLE}: got {forced[:40]!r} ({why}), expected one of {usable}")
    return forced


def obstacle(path: str) -> str:
    """Why a path cannot be used; "" if it can."""
    return _wrong.get(path, "") or _lacking(path)


def give_up(path: str, reason: str) -> None:
    """Let no further call take a path."""
    _wrong[path] = reason


_wrong: dict[str, str] = {}


@functools.cache
def _lacking(path: str) -> str:
    """What the machine or the system lacks for a path. Only for AMX is the system asked to let the process use it, which cannot
    be taken back: signal handlers' own stacks have to hold 8 KB more from then on."""
    from numba_prefix.cpu.simd.features import has_pairs, has_tiles

    if path == AMX and not has_tiles():
        return "this CPU has no AMX for bfloat16"
    if path == AMX and not _is_permitted():
        return "the system does not let this process use AMX"
    return "this CPU has no AVX512-BF16" if path == AVX512_BF16 and not has_pairs() else ""


def _is_permitted() -> bool:
    """Whether the kernel lets this process use tiles: it gives their 8 KB of state only to those that ask for it."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return False
    try:
        syscall = ctypes.CDLL(None).syscall
    except (OSError, AttributeError):
        return False
    syscall.restype = ctypes.c_long
    numbers = (ctypes.c_long(n) for n in (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    return bool(syscall(*numbers) == 0)
