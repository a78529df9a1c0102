"""The first compilation for CUDA, cut short. ctrl_c: the kernel is asked for again after each.
fork: children compile too. exit: the interpreter ends meanwhile."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Any

from interrupting import interrupted_until_done
from kernel_stubs import spec_of, stubs

from numba_prefix.cuda.compile import compiler, cubins
from numba_prefix.cuda.compile.compiler import Compiled, compile_kernel


def compiled(kind: str = "spilled") -> Compiled:
    return compile_kernel(spec_of(kind), (8, 0))


def ctrl_c() -> None:
    result, count = interrupted_until_done(lambda: cubins.kernel(spec_of("spilled"), (8, 0)))
    assert count >= 2
    assert result.cubin == compiled().cubin


def fork() -> None:
    results: list[Compiled] = []
    other = threading.Thread(target=lambda: results.append(compiled()))
    other.start()
    children = []
    while other.is_alive() and len(children) < 4:
        time.sleep(0.1)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if compiled("scaled").cubin else 2
            finally:
                os._exit(status)
        children.append(pid)
    other.join()
    assert children
    for pid in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert results[0].cubin == compiled().cubin


def exit() -> None:
    """In the middle of passes, or of the linker's library: taken down while a thread is inside it,
    it crashes now and then."""
    place, name = (compiler, "_link") if sys.argv[2] == "linking" else (compiler.toolchain().cuda, "compile")
    step, is_inside, was_inside = getattr(place, name), threading.Event(), threading.Event()

    def watched(*arguments: Any, **options: Any) -> Any:
        is_inside.set()
        was_inside.set()
        try:
            return step(*arguments, **options)
        finally:
            is_inside.clear()

    # Called after what the first compilation registers
    atexit.register(lambda: print("still inside" if is_inside.is_set() else "right"))
    compiled("scaled")
    setattr(place, name, watched)
    threading.Thread(target=compiled, daemon=True).start()
    assert was_inside.wait(60)


with stubs():
    {"ctrl_c": ctrl_c, "fork": fork, "exit": exit}[sys.argv[1]]()
    if sys.argv[1] != "exit":
        print("right")
