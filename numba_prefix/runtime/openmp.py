"""Runs a call on the threads of PyTorch's OpenMP.

After a parallel region, GNU OpenMP's threads wait for the next one in a busy loop, for
milliseconds, on the CPUs that a team of our own needs: that took 4 ms of the 76 ms of a network's
attention layer. So a call uses those threads themselves, which are awake already. The only way to
ask GNU OpenMP for them is by the entry points of its compiler, which are stable ABI.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import data_address
from numba_prefix.runtime.llvm_text import address_of, assembled, constant
from numba_prefix.runtime.signal_guard import uninterrupted

# A frame is the int64 array passed to OpenMP's threads: these fields, and the kernel's arguments
# from ARGUMENTS on. PROCESS is the process that has entered and not left, or 0: a child that it
# forks meanwhile has no threads to wait for.
PROCESS, SEATS, NUM_WORKERS, ARGUMENTS = range(4)
FIRST_ADDRESS = ARGUMENTS + 4  # index of the first array's address
ALL_ITEMS = 1 << 62
_IS_FORKED = 0x40  # PF_FORKNOEXEC of a process's flags
_FLAGS = 6  # index in /proc/self/stat, counted behind the name
_TEXT = """
define void @work(ptr %frame) {{
  %seats = getelementptr i64, ptr %frame, i64 {seats}
  %worker = atomicrmw add ptr %seats, i64 1 seq_cst
  %limit = getelementptr i64, ptr %frame, i64 {num_workers}
  %workers = load i64, ptr %limit
  %is_wanted = icmp slt i64 %worker, %workers
  br i1 %is_wanted, label %drain, label %end
drain:
  %result = alloca i64
  %error = alloca ptr
{loads}
  %status = call i32 {kernel}(ptr %result, ptr %error, {arguments}, i64 %worker, i64 {all_items})
  br label %end
end:
  ret void
}}
define void @enter(ptr %frame, i32 %team) {{
  call void {start}(ptr @work, ptr %frame, i32 %team)
  %process = call i32 {getpid}()
  store i32 %process, ptr %frame
  ret void
}}
define void @leave(ptr %frame) {{
  %entered = load i32, ptr %frame
  %process = call i32 {getpid}()
  %is_entered = icmp eq i32 %entered, %process
  br i1 %is_entered, label %wait, label %end
wait:
  store i32 0, ptr %frame
  call void {end}()
  br label %end
end:
  ret void
}}
"""


class Team:
    """PyTorch's team of threads and a kernel for them: kernel(*arrays, worker, max_items)."""

    def __init__(self, library: ctypes.CDLL, kernel: Any) -> None:
        self._size, self._is_within = library.omp_get_max_threads, library.omp_in_parallel
        enter, leave = assembled(_text(library, *_native(kernel)), ("enter", "leave"))
        self._enter = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(enter)
        self._leave = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(leave)

    def has(self, num_workers: int) -> bool:
        """Whether this thread may use so many. Asking for another number than PyTorch does would
        end some threads."""
        return num_workers <= self._size() and not self._is_within()

    def run(
        self, frame: NDArray[np.int64], num_workers: int, task: Callable[[int], None], cancel: Callable[[], None]
    ) -> None:
        """Run task(0) here and the kernel on the team's threads, as worker 1 … num_workers - 1.
        Returns, or raises an exception of task(0), when all have ended.

        frame: this call's own (frame_of). cancel: takes the work that no worker has begun out of
        the queue.
        """
        frame[NUM_WORKERS] = num_workers
        place = data_address(frame)
        try:
            self._enter(place, self._size())
            task(0)
        except BaseException:
            cancel()
            raise
        finally:
            # First of all: an interruption would strike before the call of a Python function.
            self._leave(place)


def team(kernel: Any) -> Team | None:
    """PyTorch's team if its OpenMP is GNU's and may be used, else None: in a forked process its
    threads are missing, and asking for them never returns."""
    torch = sys.modules.get("torch")
    if torch is None or _is_forked():
        return None
    return _team(str(torch.__file__), kernel)


@functools.cache
def _team(torch: str, kernel: Any) -> Team | None:
    library = _library(Path(torch).parent / "lib" / "libtorch_cpu.so")
    return None if library is None else uninterrupted(lambda: Team(library, kernel))


def _library(path: Path) -> ctypes.CDLL | None:
    """The library that finds the functions of PyTorch's own OpenMP and no other's; None where that
    isn't GNU's, or unknown."""
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    wanted = ("GOMP_parallel_start", "GOMP_parallel_end", "omp_get_max_threads", "omp_in_parallel")
    # LLVM's OpenMP has GNU's entry points too.
    return (
        library if all(hasattr(library, name) for name in wanted) and not hasattr(library, "__kmpc_fork_call") else None
    )


@functools.cache
def _is_forked() -> bool:
    try:
        flags = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_FLAGS])
    except (OSError, ValueError, IndexError):
        return True
    return flags & _IS_FORKED != 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_is_forked.cache_clear)


def _native(kernel: Any) -> tuple[int, list[str]]:
    """Address of a kernel's code, and the LLVM types of its arguments after result and error."""
    (compiled,) = kernel.overloads.values()
    function = compiled.target_context.call_conv.get_function_type(
        compiled.signature.return_type, compiled.signature.args
    )
    kinds = ["ptr" if kind.is_pointer else "i64" for kind in function.args[2:]]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name), kinds


def _text(library: ctypes.CDLL, kernel: int, kinds: list[str]) -> str:
    loads, arguments = [], []
    for place, kind in enumerate(kinds[:-2]):
        loads.append(f"%place{place} = getelementptr i64, ptr %frame, i64 {ARGUMENTS + place}")
        loads.append(f"%argument{place} = load {kind}, ptr %place{place}")
        arguments.append(f"{kind} %argument{place}")
    return _TEXT.format(
        seats=SEATS, num_workers=NUM_WORKERS, loads="\n".join(loads), kernel=constant(kernel),
        arguments=", ".join(arguments), all_items=ALL_ITEMS, start=constant(address_of(library.GOMP_parallel_start)),
        getpid=constant(address_of(library.getpid)),
        end=constant(address_of(library.GOMP_parallel_end)),
    )  # fmt: skip


def frame_of(arrays: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """A frame with a kernel's arrays, as Numba passes them: owners (left 0: no reference is
    counted), size, item size, address, shape and strides."""
    frame = [0, 1, 1]
    for array in arrays:
        frame += [0, 0, array.size, array.itemsize, data_address(array), *array.shape, *array.strides]
    return np.array(frame, np.int64)
