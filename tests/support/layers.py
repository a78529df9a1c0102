"""Numba's threading layers: the installed ones, and an environment in which a host uses one of
them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults import ANY_LAYER
from processes import environment

LAYERS = ("omp", "workqueue", "tbb", ANY_LAYER)


@functools.cache
def library_path() -> str:
    """The folder where pip puts libtbb, which the loader does not search by itself."""
    return os.pathsep.join(filter(None, [str(Path(sys.prefix) / "lib"), os.environ.get("LD_LIBRARY_PATH")]))


def chosen(layer: str, **changes: str | None) -> dict[str, str]:
    """The environment of a process whose host chooses a layer, or leaves that to Numba."""
    name = None if layer == ANY_LAYER else layer
    paths = {"LD_LIBRARY_PATH": library_path(), "NUMBA_NUM_THREADS": "2"}
    return environment(**({"NUMBA_THREADING_LAYER": name} | paths | changes))


@functools.cache
def has_layer(layer: str) -> bool:
    code = "import numba, numpy\nf = numba.njit(parallel=True)(lambda x: x + 1.0)\nf(numpy.ones(9))"
    done = subprocess.run([sys.executable, "-c", code], env=chosen(layer), capture_output=True, check=False)
    return done.returncode == 0


def under(layer: str, **changes: str | None) -> dict[str, str]:
    if not has_layer(layer):
        pytest.skip(f"Numba has no threading layer {layer} here")
    return chosen(layer, **changes)
