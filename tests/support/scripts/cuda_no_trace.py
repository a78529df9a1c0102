"""What compiling for CUDA leaves of itself in the process: nothing but modules. And the CPU's
kernels are what they were."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path

from cases import make_case, run, same_bits
from kernel_stubs import spec_of, stubs
from no_trace import differences, state

CASE = make_case([30, 1], [60, 90], head_num=4, head_size=64, dtype="float16")

warnings.simplefilter("error")
expected = run(CASE, "cpu")
before = state()
threads = threading.active_count()
with stubs():
    from numba_prefix.cuda.compile.compiler import compile_kernel

    assert not any(name in sys.modules for name in ("numba.cuda", "numba_cuda", "cuda.core"))
    compile_kernel(spec_of("scaled"), (8, 0))
found = [name for name, *_ in differences(before, state())]
assert set(found) <= {"descriptors"}, found
if sys.platform == "linux":  # none but of the libraries that were loaded
    assert not {Path(f"/proc/self/fd/{n}").resolve() for n in state()["descriptors"]} & {Path("/dev/nvidiactl")}
assert threading.active_count() == threads
same_bits(run(CASE, "cpu"), expected)
