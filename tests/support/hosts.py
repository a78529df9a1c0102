"""A host's own work beside the package: a parallel function, which starts one of Numba's threading
layers."""

from __future__ import annotations

import os

import numba
import numpy as np

ONES = np.ones(100_000)


def _hosts_own(x: np.ndarray) -> float:
    total = 0.0
    for i in numba.prange(x.size):
        total += x[i]
    return total


try:
    hosts_own = numba.njit(parallel=True, cache=True)(_hosts_own)
except RuntimeError:  # Numba's own cache needs a writable place
    hosts_own = numba.njit(parallel=True)(_hosts_own)


def bring_up() -> str:
    """Run a parallel region under $NUMBA_THREADING_LAYER, or under the layer that Numba chooses."""
    assert hosts_own(ONES) == ONES.size
    if numba.config.DISABLE_JIT:
        return ""
    layer = numba.threading_layer()
    assert layer == os.environ.get("NUMBA_THREADING_LAYER", layer)
    return layer
