"""The first compilation for CUDA, cut short. ctrl_c: the kernel is asked for again after each. fork: children compile too. exit: the
interpreter ends meanwhile."""

from __future__ import annotations

import os
import sys
import threading
import time

from interrupting import interrupted_until_done
from kernel_stubs import spec_of, stubs

from numba_prefix.cuda import compile, cubins
from numba_prefix.cuda.compile import Compiled, compile_kernel


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
    """In the middle of passes, and in the middle of the compiler's libraries."""
    compiled("scaled")
    step = compile._link if sys.argv[2] == "linking" else compile.source_of
    is_there = threading.Event()

    def watched(*arguments: object) -> object:
        is_there.set()
        return step(*arguments)  # type: ignore[arg-type]

    setattr(compile, step.__name__, watched)
    threading.Thread(target=compiled, daemon=True).start()
    assert is_there.wait(60)


with stubs():
    {"ctrl_c": ctrl_c, "fork": fork, "exit": exit}[sys.argv[1]]()
    print("right")
