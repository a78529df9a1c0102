"""Laws of the house: who may import whom, what an import costs, how long a start takes."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ROOT, environment

PACKAGE = ROOT / "numba_prefix"
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def names(path: Path, *prefixes: str) -> set[str]:
    return {name for name in imports(path) if any(name == p or name.startswith(f"{p}.") for p in prefixes)}


@pytest.mark.parametrize(
    "module",
    [
        "vocabulary",
        "masks",
        "softmax",
        "tiling",
        "problem",
        "lengths",
        "held",
        "planning",
        "slopes",
        "buffers",
        "workspace",
        "arrays",
        "reference",
    ],
)
def test_rules_know_no_numba(module: str) -> None:
    assert names(PACKAGE / f"{module}.py", "numba", "llvmlite", "numba_prefix.cpu", "numba_prefix.cuda") == set()


def test_reference_shares_no_rules() -> None:
    """Of masks.py it may know the kinds' names, no more."""
    path = PACKAGE / "reference.py"
    assert names(path, "numba_prefix.softmax", "numba_prefix.tiling", "numba_prefix.vocabulary") == set()
    assert names(path, "numba_prefix.masks") == {"numba_prefix.masks.MaskType"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_targets_keep_apart(path: Path) -> None:
    """Only cuda/ imports numba.cuda; cpu/ and cuda/ do not know each other, nor the door above them."""
    target = path.relative_to(PACKAGE).parts[0]
    if target != "cuda":
        assert names(path, "numba.cuda", "numba_cuda") == set()
    if target in ("cpu", "cuda"):
        other = "cuda" if target == "cpu" else "cpu"
        assert names(path, f"numba_prefix.{other}", "numba_prefix.front", "numba_prefix.reference") == set()


def test_one_module_knows_the_driver() -> None:
    """What is not said through cuda/driver.py is unknown to the fake driver of the tests."""
    users = [path.name for path in FILES if names(path, "cuda.bindings.driver", "cuda.core.Device", "cuda.core.Stream")]
    assert users == ["driver.py"]


def test_jit_options_in_one_place() -> None:
    for path in FILES:
        if path.name != "jit.py":
            text = path.read_text()
            assert "njit" not in text.replace("@njit`", "")
            assert "fastmath=" not in text


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def test_import_is_light() -> None:
    """`import numba_prefix` brings neither Numba nor what the caller did not bring, and takes < 0.6 s (best of three)."""
    code = (
        "import sys, time; start = time.perf_counter(); import numba_prefix; took = time.perf_counter() - start\n"
        "print(took, *[m for m in ('numba', 'numba.cuda', 'llvmlite', 'torch', 'ml_dtypes') if m in sys.modules])"
    )
    runs = [python(code).split() for _ in range(3)]
    assert all(len(run) == 1 for run in runs), runs
    assert min(float(run[0]) for run in runs) < 0.6


def test_second_process_is_fast() -> None:
    """From the start of the interpreter to a first result < 2 s where the kernels are cached (best of three)."""
    code = (
        "import numpy as np, numba_prefix as nbp; x = np.ones((5, 2, 16), np.float16)\n"
        "cache = np.ones((3, 16, 2, 16), np.float16); tables = np.array([[1, 2]], np.int32)\n"
        "print(nbp.prefix_encoder(x, cache, cache, tables, [5], [20]).sum())"
    )
    assert float(python(code)) == 160.0  # compiles, if nothing did before
    times = []
    for _ in range(3):
        start = time.perf_counter()
        python(code)
        times.append(time.perf_counter() - start)
    assert min(times) < 2.0
