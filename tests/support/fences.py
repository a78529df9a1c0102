"""Memory that ends, or begins, at a page without access: reading or writing one byte too far ends
the process."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from typing import Any

import numpy as np
from cases import Case

PAGE = mmap.PAGESIZE
PROT_NONE, PROT_READ = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _protect(address: int, size: int, protection: int) -> None:
    if _libc.mprotect(address, size, protection):
        raise OSError(ctypes.get_errno(), "mprotect")


def fenced_bytes(size: int, is_at_end: bool) -> tuple[np.ndarray, int]:
    """uint8 [size] whose last byte (or first) stands next to a page without access, and the address
    of its first page."""
    room = -(-max(size, 1) // PAGE) * PAGE
    # Unmapped with the last array on it, whatever its protection.
    memory = mmap.mmap(-1, room + 2 * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for begin in (base, base + PAGE + room):
        _protect(begin, PAGE, PROT_NONE)
    return np.frombuffer(memory, np.uint8, size, PAGE + (room - size if is_at_end else 0)), base + PAGE


def fenced(array: np.ndarray, is_at_end: bool, *, is_read_only: bool = False) -> np.ndarray:
    """A dense copy next to a fence; is_read_only: its pages cannot be written, although NumPy does
    not know."""
    memory, first_page = fenced_bytes(array.nbytes, is_at_end)
    view = memory.view(array.dtype).reshape(array.shape)
    view[...] = array
    if is_read_only:
        _protect(first_page, -(-max(array.nbytes, 1) // PAGE) * PAGE, PROT_READ)
    return view


def fence(case: Case, is_at_end: bool) -> Case:
    """Put every array of a case beside a fence, in pages that cannot be written."""
    arrays: dict[str, Any] = {
        name: fenced(x, is_at_end, is_read_only=True)
        for name, x in case.arguments().items()
        if isinstance(x, np.ndarray)
    }
    return replace(case, **arrays)
