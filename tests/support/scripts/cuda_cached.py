"""Prints the source of a stub kernel, a digest of its cubin, and whether Numba was needed."""

from __future__ import annotations

import hashlib
import sys

from kernel_stubs import spec_of, stubs

from numba_prefix.cuda.compile import cubins

with stubs():
    found, source = cubins.obtain(spec_of("scaled"), (8, 0))
print(source, hashlib.sha256(found.cubin).hexdigest(), "heavy" if "numba" in sys.modules else "light")
