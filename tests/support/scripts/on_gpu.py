"""A few calls on a GPU, for compute-sanitizer to watch: every family, a merge, a bad block id, an
unaligned head."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from cases import assert_close, make_case

import numba_prefix as nbp
from numba_prefix.cuda.device.array import GpuArray

for dtype in ("float16", "bfloat16", "float32"):
    for head_size in (64, 20):
        case = make_case([5, 0, 70, 1], [21, 7, 150, 2100], head_num=4, kv_head_num=2, head_size=head_size, dtype=dtype)
        arguments = case.arguments()
        given = {name: GpuArray.of(v) if isinstance(v, np.ndarray) else v for name, v in arguments.items()}
        out, lse = nbp.prefix_encoder(**given, return_lse=True, validate="wait")
        assert_close(out.get(), case, lse.get())
        tables = case.block_tables.copy()
        tables[3, 4] = len(case.key) + 5
        with pytest.raises(ValueError, match="sequence 3, column 4"):
            nbp.prefix_encoder(**given | {"block_tables": GpuArray.of(tables)}, validate="wait")
