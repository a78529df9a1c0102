"""Run a target on arrays that end, and then begin, at memory that must not be touched."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import replace

import numpy as np
from cases import Case, make_case, run, same_bits, with_mask

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
keep: list[mmap.mmap] = []


def fenced(array: np.ndarray, is_at_end: bool) -> np.ndarray:
    """A copy whose last byte (or first) stands next to a page without access."""
    size = -(-max(array.nbytes, 1) // PAGE) * PAGE
    memory = mmap.mmap(-1, size + 2 * PAGE)
    keep.append(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for begin in (base, base + PAGE + size):
        if libc.mprotect(begin, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE + (size - array.nbytes if is_at_end else 0)
    view = np.frombuffer(memory, np.uint8, array.nbytes, offset).view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def fence(case: Case, is_at_end: bool) -> Case:
    arrays = {name: fenced(x, is_at_end) for name, x in case.arguments().items() if isinstance(x, np.ndarray)}
    return replace(case, **arrays)


def main(target: str) -> None:
    for head_size in (1, 3, 16, 17, 33, 80, 256):
        for dtype in ("float16", "bfloat16", "float32"):
            for form in ("causal", "alibi-template", "alibi_sqrt-heads"):
                for block_size in (1, 5, 16):
                    # No spare block and the last page full: the last key of the cache is the last thing before the fence.
                    q, kv = [7, 1, 18], [15, 20, 60]
                    options = {"head_num": 6, "kv_head_num": 2, "head_size": head_size, "dtype": dtype}
                    case = make_case(q, kv, block_size=block_size, spare=0, tail=0, **options)
                    case = with_mask(case, form)
                    expected, expected_lse = run(case, target, return_lse=True)
                    for is_at_end in (True, False):
                        out = fenced(np.full(case.query.shape, np.nan, case.query.dtype), is_at_end)
                        _, lse = run(fence(case, is_at_end), target, return_lse=True, out=out)
                        same_bits(out, expected)
                        same_bits(lse, expected_lse)


main(sys.argv[1])
