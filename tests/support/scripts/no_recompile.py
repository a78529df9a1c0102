"""New shapes, slices and read-only arrays after one call per dtype and mask kind.

They compile nothing and take no longer.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from cases import DTYPES, MASK_FORMS, make_case, run, with_mask
from numba.core import event

for dtype in DTYPES:
    for form in MASK_FORMS:
        run(with_mask(make_case([2, 1], [9, 40], head_num=4, kv_head_num=2, dtype=dtype), form), "cpu")

rng = np.random.default_rng(0)
seconds = []
with event.install_recorder("numba:run_pass") as recorder:
    for index in range(60):
        dtype, form = list(DTYPES)[index % 3], MASK_FORMS[index % len(MASK_FORMS)]
        group, head_size = int(rng.choice([1, 2, 4])), int(rng.choice([48, 64, 80]))
        q = rng.integers(300, 350, 2).tolist()
        kv = [n + int(rng.integers(600, 700)) for n in q]
        options = {"head_num": 4, "kv_head_num": 4 // group, "head_size": head_size, "dtype": dtype}
        case = with_mask(make_case(q, kv, block_size=int(rng.integers(8, 70)), seed=index, **options), form)
        wide = np.zeros((case.query.shape[0], 9, head_size), case.query.dtype)
        wide[:, 2:6] = case.query
        case = replace(case, query=wide[:, 2:6])
        for array in (case.key, case.value, case.block_tables):
            array.flags.writeable = False
        start = time.perf_counter()
        run(case, "cpu")
        seconds.append(time.perf_counter() - start)
assert not recorder.buffer, f"{len(recorder.buffer)} compiler passes after the warm-up"
for dtype in DTYPES:
    own = seconds[list(DTYPES).index(dtype) :: 3]
    assert max(own) <= 10 * np.median(own), (dtype, max(own), float(np.median(own)))
