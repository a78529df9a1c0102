"""Path `amx`: bfloat16 and float16 on AMX's tiles."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

from numba_prefix.cpu.kernel.scratch import bf16_scratch
from numba_prefix.cpu.paths.record import MicroKernels, Path, Scratch

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def _missing() -> str:
    """Only here is the system asked to let the process use AMX, which cannot be taken back: signal
    handlers' own stacks have to hold 8 KB more from then on."""
    from numba_prefix.cpu.simd.features import has_tiles

    if not has_tiles():
        return "this CPU has no AMX for bfloat16"
    return "" if is_permitted() else "the system does not let this process use AMX"


@functools.cache
def is_permitted() -> bool:
    """Whether the kernel lets this process use tiles: it gives their 8 KB of state only to those
    that ask for it."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return False
    try:
        syscall = ctypes.CDLL(None).syscall
    except (OSError, AttributeError):
        return False
    syscall.restype = ctypes.c_long
    numbers = (ctypes.c_long(n) for n in (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    return bool(syscall(*numbers) == 0)


def _micro_kernels() -> MicroKernels:
    from numba_prefix.cpu.kernel import amx, prefill_bf16
    from numba_prefix.cpu.simd.amx_tiles import enter_tiles, leave_tiles

    steps = amx.pack_values, amx.scale_acc, amx.step
    return MicroKernels(prefill_bf16.load_queries, prefill_bf16.make_attend(*steps), enter_tiles, leave_tiles, steps)


def _scratch(dtype: str, head_size: int, tile_rows: int) -> Scratch:
    return bf16_scratch(head_size, tile_rows, planes=2 if dtype == "float16" else 1, is_by_dim=True)


PATH = Path(
    name="amx",
    dtypes=("bfloat16", "float16"),
    missing=_missing,
    micro_kernels=_micro_kernels,
    scratch=_scratch,
    # Packing keys and values takes a fifth of the time of 128 rows' products, by count of
    # instructions.
    tile_heights=(256, 512),
    tiles_per_thread=8,
    guessed_speed=4.0,
)
