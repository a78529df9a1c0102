"""Prints a digest of everything that a stub kernel is compiled to, as `repr(compute capability)
digest` lines. Arguments: kinds."""

from __future__ import annotations

import hashlib
import sys

from kernel_stubs import spec_of, stubs

from numba_prefix.cuda.compile.compiler import compile_kernel

with stubs():
    for kind in sys.argv[1:]:
        for cc in ((8, 0), (12, 0)):
            print(kind, cc, hashlib.sha256(repr(compile_kernel(spec_of(kind), cc)).encode()).hexdigest())
