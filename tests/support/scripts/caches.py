"""First calls that find the cache directory in a bad state.

The large kernel's file is in it and whole, unless said otherwise, so that only the two small
kernels are compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from cases import assert_close, make_case, run
from interrupting import interrupted_until_done
from numba.core import event

SMALL = ("count_work", "fill_work")
CASE = make_case([30, 1], [200, 90], head_num=4, kv_head_num=2, head_size=32, dtype="float16")
os.environ.setdefault("NUMBA_PREFIX_ISA", "vector")  # whose kernel is named drain
OTHER_CPU = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16"}


@contextlib.contextmanager
def cache(*kernels: str, where: str | None = None) -> Iterator[Path]:
    """A cache directory for this process with the whole files of some kernels."""
    whole = Path(os.environ["NUMBA_CACHE_DIR"]) / "numba_prefix"
    with tempfile.TemporaryDirectory() as top:
        os.environ["NUMBA_CACHE_DIR"] = top if where is None else where
        mine = Path(os.environ["NUMBA_CACHE_DIR"]) / "numba_prefix"
        mine.mkdir()
        for path in native_files(whole, *kernels):
            shutil.copy(path, mine)
        yield mine


def native_files(directory: Path, *kernels: str) -> list[Path]:
    """Cache files that this process would load."""
    from numba.core.typing.typeof import Purpose, typeof

    from numba_prefix.cpu import target
    from numba_prefix.cpu.kernel.work_loop import drain
    from numba_prefix.runtime.disk_cache import path_of

    found = []
    for kernel in (drain if name == "drain" else getattr(target, name) for name in kernels):
        integers, factors = np.zeros(1, np.int64), np.zeros(1, np.float32)
        table = np.zeros((1, 1), np.int64)
        arguments = {
            "count_work": (table, table, 1, 1, True, 1, 1, integers),
            "fill_work": (table, table, 1, 1, 1, True, 1, 1, integers, table),
            "drain": (integers, factors, table, table, table, 1, 1),
        }[kernel.__name__]
        signature = tuple(typeof(x, Purpose.argument) for x in arguments)
        key = kernel._cache._key(signature, kernel.targetctx.codegen())
        path = path_of(kernel.__name__, key)
        assert path is not None
        found.append(directory / path.name)
    return found


def call(compiled: tuple[str, ...]) -> None:
    """Make a call: the result is right, and exactly these kernels are compiled for it."""
    with event.install_recorder("numba:compile") as recorder:
        out, lse = run(CASE, "cpu", return_lse=True)
    assert_close(out, CASE, lse)
    names = {e.data["dispatcher"].py_func.__name__ for _, e in recorder.buffer if e.is_start}
    ours = names & {*SMALL, "drain"}
    assert ours == set(compiled), ours


def truncated() -> None:
    """Truncate the files, as in numba#10128."""
    with cache(*SMALL, "drain") as directory:
        sizes = {path: path.stat().st_size for path in native_files(directory, *SMALL)}
        for path, size in sizes.items():
            os.truncate(path, size // 2)
        call(compiled=SMALL)
        assert all(path.stat().st_size > 0.9 * size for path, size in sizes.items())


def foreign() -> None:
    """Put bytes that never were code under one name, and another kernel's whole file under the
    other."""
    with cache(*SMALL, "drain") as directory:
        count, fill = native_files(directory, *SMALL)
        shutil.copy(count, fill)
        count.write_bytes(np.random.default_rng(0).bytes(count.stat().st_size))
        before = count.read_bytes(), fill.read_bytes()
        call(compiled=SMALL)
        assert count.read_bytes() != before[0]
        assert fill.read_bytes() != before[1]


def other_cpu() -> None:
    """Add the files of an older CPU beside the large kernel's."""
    with cache("drain") as directory:
        code = (
            "import numpy as np; from numba_prefix.rules import tiling; from numba_prefix.cpu import target\n"
            "totals = np.zeros(3 + tiling.COST_BUCKETS, np.int64)\n"
            "empty = np.zeros((0, 1), np.int64)\n"
            "target.count_work(empty, empty, 1, 1, True, 128, 128, totals)"
        )
        subprocess.run([sys.executable, "-c", code], env=os.environ | OTHER_CPU, check=True)
        theirs = list(directory.glob("count_work-*"))
        assert len(theirs) == 1
        assert theirs != native_files(directory, "count_work")
        before = theirs[0].read_bytes()
        call(compiled=SMALL)
        assert theirs[0].read_bytes() == before


def full_disk() -> None:
    """Fill the file system; where none may be mounted, stop files from growing."""
    room = native_files(Path(os.environ["NUMBA_CACHE_DIR"]) / "numba_prefix", "drain")[0].stat().st_size + (16 << 10)
    with tempfile.TemporaryDirectory() as point:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", point]
        is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        try:
            with cache("drain", where=point) as directory:
                if not is_mounted:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, resource.RLIM_INFINITY))
                try:
                    (directory / "more").write_bytes(bytes(32 << 10))
                    raise AssertionError("the disk is not full")
                except OSError:
                    (directory / "more").unlink()
                call(compiled=SMALL)
                assert list(directory.iterdir()) == native_files(directory, "drain")
        finally:
            if is_mounted:
                subprocess.run(["umount", point], check=True)


def read_only() -> None:
    with cache("drain") as directory:
        directory.chmod(0o555)
        try:
            with bound_by_permissions():
                assert not os.access(directory, os.W_OK, effective_ids=True)
                call(compiled=SMALL)
        finally:
            directory.chmod(0o755)
        assert list(directory.iterdir()) == native_files(directory, "drain")


@contextlib.contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Give up root's capabilities, so that permissions bind this process."""
    version, libc = 0x20080522, ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(version, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32
    if os.geteuid() == 0:
        assert libc.capget(header, sets) == 0
    had = sets[0], sets[3]
    sets[0] = sets[3] = 0
    if os.geteuid() == 0:
        assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0], sets[3] = had
        if os.geteuid() == 0:
            assert libc.capset(header, sets) == 0


def ctrl_c() -> None:
    with cache("drain"):
        _, count = interrupted_until_done(lambda: run(CASE, "cpu"))
        assert count >= 2
        call(compiled=())


def exit() -> None:
    """End the interpreter while LLVM is at work on the large kernel, in a daemon thread."""
    with cache() as directory:
        thread = threading.Thread(target=run, args=(CASE, "cpu"), daemon=True)
        thread.start()
        while len(list(directory.iterdir())) < 2:
            assert thread.is_alive()
            time.sleep(0.05)
        time.sleep(1.0)
        assert thread.is_alive()
