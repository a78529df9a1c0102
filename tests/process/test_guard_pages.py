"""Memory safety: every buffer next to a page without access, inputs in pages that cannot be
written.

The long form: `PYTHONPATH=.:tests python tests/support/scripts/guard_pages.py cpu --minutes 20`.
"""

from __future__ import annotations

import sys

import pytest
from cases import DTYPES
from faults import fault
from processes import run_script

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="uses mprotect")


@pytest.mark.parametrize("kind", ["decode", "prefill", "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_access_outside_a_buffer(kernel: str, dtype: str, kind: str) -> None:
    """query, key, value, block_tables, mask, slopes, out and the workspace, ending and beginning at
    a guard page."""
    with fault("guard"):
        run_script("guard_pages.py", kernel, dtype, kind)


def test_random_problems_between_guard_pages(kernel: str) -> None:
    """A few seconds of the long form."""
    with fault("guard"):
        assert run_script("guard_pages.py", kernel, "--minutes", 0.03).splitlines()[-1].endswith("problems")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_other_operations(dtype: str) -> None:
    """reshape_and_cache and merge_states read and write nothing beside their arrays."""
    with fault("guard_others"):
        run_script("guard_pages.py", "others", dtype)


def test_the_guard_pages_guard() -> None:
    """A byte too far does end a process, and a write to an input."""
    for code in ("fenced(x, True).ctypes.data + 8", "fenced(x, False).ctypes.data - 1"):
        assert dies(f"ctypes.string_at({code}, 1)")
    assert dies("fenced(x, True, is_read_only=True)[...] = 1")
    assert not dies("fenced(x, True)[...] = 1")


def dies(statement: str) -> bool:
    import subprocess

    from processes import environment

    code = f"import ctypes, numpy as np\nfrom fences import fenced\nx = np.zeros(8, np.uint8)\ny = 0\n{statement}"
    return subprocess.run([sys.executable, "-c", code], env=environment(), check=False, timeout=60).returncode < 0
