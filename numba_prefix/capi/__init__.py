"""The C interface: ATB's AtbSelfAttentionPrefixEncoder as C function pointers;
include/numba_prefix.h describes them.

C and C++ code in a process that hosts Python gets the functions from `load`; nothing is linked.
They may be called from any thread, with or without the GIL.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from pathlib import Path

API_VERSION = 1  # NUMBA_PREFIX_API_VERSION of the header


@dataclass(frozen=True, slots=True)
class Functions:
    """Addresses of the C functions, and of the header's NumbaPrefixApi that holds them all. Valid
    as long as the process lives."""

    AtbSelfAttentionPrefixEncoderGetWorkspaceSize: int
    AtbSelfAttentionPrefixEncoder: int
    NumbaPrefixDestroyOperation: int
    NumbaPrefixGetLastError: int
    table: int


NAMES = tuple(field.name for field in fields(Functions) if field.name != "table")
_loaded: dict[str, Functions] = {}


def load(*, warmup: bool = False) -> Functions:
    """The C functions, the same at every call and in every thread.

    warmup: also compile the kernel, or load it from the cache, and check a small result, as the
    first call of a C function does otherwise (about 15 s where nothing is cached). Raises TypeError
    for anything but a bool, and the errors of numba_prefix.warmup.
    """
    if not isinstance(warmup, bool):
        raise TypeError(f"warmup: got {type(warmup).__name__}, expected a bool")
    if not _loaded:
        # No lock, since a fork could leave it locked: if two threads come here, the first one's
        # functions are kept.
        _loaded.setdefault("functions", _build())
    if warmup:
        from numba_prefix.verify.warmup import warmup as compile_and_check

        compile_and_check("cpu", dtypes="float32", head_sizes=64, mask_types="causal")
    return _loaded["functions"]


def include_directory() -> str:
    """The folder of numba_prefix.h, for a compiler's -I."""
    return str(Path(__file__).parent / "include")


class _Api(ctypes.Structure):
    """NumbaPrefixApi of the header."""

    _fields_ = (("version", ctypes.c_uint64), *((name, ctypes.c_void_p) for name in NAMES))


def _build() -> Functions:
    from numba_prefix.capi.calls import EXPORTS, interrupted
    from numba_prefix.capi.native import keep_forever, native_functions

    addresses = dict(zip([export.name for export in EXPORTS], native_functions(EXPORTS, interrupted), strict=True))
    table = _Api(API_VERSION, *(addresses[name] for name in NAMES))
    keep_forever(table)
    return Functions(**addresses, table=ctypes.addressof(table))
