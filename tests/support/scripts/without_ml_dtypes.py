"""An environment without ml_dtypes: importing it fails."""

from __future__ import annotations

import sys

import numpy as np

sys.modules["ml_dtypes"] = None  # type: ignore[assignment]

import numba_prefix as nbp  # noqa: E402

rng = np.random.default_rng(0)
table = np.array([[1, 0]], np.int32)
for dtype in (np.float16, np.float32):
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in ((5, 2, 16), (2, 16, 2, 16), (2, 16, 2, 16)))
    out = nbp.prefix_encoder(q, k, v, table, [5], [20], target="cpu")
    ref = nbp.reference(q, k, v, table, [5], [20])
    assert out.dtype == dtype
    assert np.abs(out - ref).max() < 4e-3

try:
    import torch
except ImportError:
    sys.exit(0)
q, k, v = (torch.from_numpy(x.astype(np.float32)).bfloat16() for x in (q, k, v))
out = nbp.prefix_encoder(q, k, v, torch.from_numpy(table), [5], [20], target="cpu")
assert out.dtype == torch.bfloat16
wide = [x.float().numpy() for x in (q, k, v)]
ref = nbp.reference(*wide, table, [5], [20])
assert np.abs(out.float().numpy() - ref).max() < 4e-2
