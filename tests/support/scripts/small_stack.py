"""small_stack.py KIB WHERE: first calls in a process whose new threads have that much stack (0: as
usual), from the main thread or from a new one. Prints a digest of the results."""

from __future__ import annotations

import hashlib
import sys
import threading

import numpy as np

import numba_prefix as nbp


def calls() -> None:
    rng = np.random.default_rng(0)
    digest = hashlib.sha256()
    for dtype in (np.float16, np.float32):
        query = rng.standard_normal((223, 8, 64)).astype(dtype)
        key, value = (rng.standard_normal((80, 8, 2, 64)).astype(dtype) for _ in range(2))
        table = np.arange(80, dtype=np.int32).reshape(2, 40)
        out = nbp.prefix_encoder(query, key, value, table, [3, 220], [290, 320], qk_scale=0.125, num_threads=4)
        digest.update(out.tobytes())
    print(digest.hexdigest())


def main() -> None:
    threading.stack_size(int(sys.argv[1]) << 10)
    if sys.argv[2] == "main":
        calls()
    else:
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
    assert threading.stack_size() == int(sys.argv[1]) << 10


main()
