"""Public bug reports of this field as cases, D23 to D31: threads, caches and compilation inside services."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, TESTS, environment, finish, run_script, start

CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24
PACKAGE = ROOT / "numba_prefix"
IS_LINUX = sys.platform.startswith("linux")
pytestmark = pytest.mark.skipif(not IS_LINUX, reason="uses /proc, fork, capabilities and CPU affinity")


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if IS_LINUX else 1


def outcome(output: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert result["error"] < 2e-3, result
    return result


@pytest.fixture(scope="module")
def expected() -> str:
    """The bits of scripts/one_call.py in an ordinary process."""
    bits: str = outcome(run_script("one_call.py"))["bits"]
    return bits


# --- D23, D24: threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["workqueue", "omp", "tbb"])
def test_d23_calls_from_many_threads(layer: str) -> None:
    """numba#8563, #9288: 8 threads x 50 calls are safe under every threading layer, which is never brought up."""
    run_script("many_threads.py", env=environment(NUMBA_THREADING_LAYER=layer))


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_d23_beside_a_parallel_function_of_the_user(layer: str) -> None:
    """A prange function of the user's runs at the same time: under workqueue a second user of the layer aborts."""
    output = run_script("many_threads.py", "prange", env=environment(NUMBA_THREADING_LAYER=layer))
    assert output.split()[-1] == layer


def test_d23_fork_after_a_call() -> None:
    """A process that has called forks (gunicorn, multiprocessing): the child's calls work, and the parent's."""
    run_script("fork_after_call.py")


TWO_CPUS = pytest.mark.skipif(usable_cpus() < 2, reason="one CPU: nobody to help")


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        pytest.param("per_call", {}, marks=TWO_CPUS),
        ("capped", {"NUMBA_NUM_THREADS": "1"}),
        ("many", {"NUMBA_NUM_THREADS": "64"}),
        ("mask", {}),
        ("mask", {"NUMBA_NUM_THREADS": "1"}),
    ],
)
def test_d24_thread_cap(mode: str, changes: dict[str, str]) -> None:
    """numba#10491, abTEM PR#441: the cap holds in pool threads too, and Numba's own mask stays the caller's."""
    run_script("thread_caps.py", mode, env=environment(**changes))


def test_d24_affinity_is_the_cap() -> None:
    """A process bound to one CPU uses one thread."""
    run_script("thread_caps.py", "capped", "pinned")


# --- D25, D26: the compile cache ---------------------------------------------------------------------------------------


def bound_by_permissions() -> None:
    """Root writes where it pleases; without this capability it is stopped by permissions as anybody is."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def start_in(where: Path, *arguments: str, script: str = "one_call.py", **changes: str | None) -> Any:
    """A script with the package of `where`, in a home that cannot be written."""
    home = where.parent / "home"
    home.mkdir(exist_ok=True)
    home.chmod(0o555)
    env = environment(HOME=str(home), XDG_CACHE_HOME=None, **changes)
    env["PYTHONPATH"] = os.pathsep.join([str(where), str(TESTS)])
    return start(script, *arguments, env=env, cwd=home, preexec_fn=bound_by_permissions)


@pytest.fixture(scope="module")
def read_only_install(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for PYTHONPATH with a copy of the package in which nothing can be written."""
    top = tmp_path_factory.mktemp("install") / "site-packages"
    shutil.copytree(PACKAGE, top / "numba_prefix", ignore=shutil.ignore_patterns("__pycache__"))
    everything = [top, *top.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield top
    for path in everything:
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture(scope="module")
def uncached(read_only_install: Path) -> dict[str, Any]:
    """What one call does where no cache can be had."""
    return outcome(finish(start_in(read_only_install, "--flags", NUMBA_CACHE_DIR=None)))


def test_d25_read_only_install(uncached: dict[str, Any], read_only_install: Path, expected: str) -> None:
    """numba#4908, #4032: nothing can be written anywhere: import and call work, uncached."""
    assert uncached["where"] == str(read_only_install / "numba_prefix")
    assert uncached["bits"] == expected
    assert uncached["passes"] > 0
    assert not list(read_only_install.rglob("__pycache__"))


def test_d25_import_from_a_zip(tmp_path: Path, expected: str) -> None:
    """The package in a zip archive, and a NUMBA_CACHE_DIR that cannot be written."""
    archive, cache = tmp_path / "site.zip", tmp_path / "cache"
    with zipfile.ZipFile(archive, "w") as z:
        for path in PACKAGE.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                z.write(path, path.relative_to(ROOT))
    cache.mkdir(mode=0o555)
    result = outcome(finish(start_in(archive, NUMBA_CACHE_DIR=str(cache))))
    assert result["where"].startswith(str(archive)) and result["bits"] == expected
    assert not list(cache.iterdir())


@pytest.fixture(scope="module")
def filled_cache(read_only_install: Path, tmp_path_factory: pytest.TempPathFactory, expected: str) -> Path:
    """A NUMBA_CACHE_DIR that four processes found empty and filled at the same time, right results in each.

    In one of them eight threads make the first call together (D23: numba#2804, #908).
    """
    cache = tmp_path_factory.mktemp("cache")
    changes = {"NUMBA_CACHE_DIR": str(cache), "NUMBA_THREADING_LAYER": "workqueue"}
    threads = start_in(read_only_install, script="many_threads.py", **changes)
    for process in [start_in(read_only_install, NUMBA_CACHE_DIR=str(cache)) for _ in range(3)]:
        result = outcome(finish(process, timeout=240))
        assert result["bits"] == expected and result["passes"] > 0
    finish(threads, timeout=240)
    return cache


@pytest.mark.parametrize("threads", ["1", "16"])
def test_d26_cold_start_of_several_processes(
    filled_cache: Path, read_only_install: Path, expected: str, threads: str
) -> None:
    """numba#4807, #7518, and D25 with NUMBA_CACHE_DIR: what they left is used by the next, with any thread count."""
    assert [path for path in filled_cache.rglob("*") if path.is_file()]
    changes = {"NUMBA_CACHE_DIR": str(filled_cache), "NUMBA_NUM_THREADS": threads}
    result = outcome(finish(start_in(read_only_install, f"num_threads={threads}", **changes)))
    assert result["bits"] == expected and result["passes"] == 0


def test_d26_damaged_cache(filled_cache: Path, read_only_install: Path, expected: str) -> None:
    """numba#10128: files cut in half are noticed, and replaced by good ones."""
    for path in filled_cache.rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)
    for is_compiled in (True, False):
        result = outcome(finish(start_in(read_only_install, NUMBA_CACHE_DIR=str(filled_cache))))
        assert result["bits"] == expected and (result["passes"] > 0) is is_compiled


# --- D27, D30, D31: compilation ----------------------------------------------------------------------------------------


def test_d27_no_relaxed_arithmetic(uncached: dict[str, Any]) -> None:
    """numba#6217, #8708: no kernel may assume that NaN and infinity do not occur."""
    assert uncached["dispatchers"] > 0 and uncached["llvm_bytes"] > 0
    assert uncached["fastmath"] == [] and uncached["lines"] == []


@pytest.mark.parametrize("variable", ["NUMBA_BOUNDSCHECK", "NUMBA_DISABLE_JIT"])
def test_d30_other_ways_to_run(tmp_path: Path, variable: str) -> None:
    """numba#9638, #8028: with bounds checks, and with JIT switched off for the user's functions: the same answers."""
    run_script("agree.py", "cpu", env=environment(NUMBA_CACHE_DIR=str(tmp_path), **{variable: "1"}))


def test_d31_no_compilation_after_the_warm_up() -> None:
    """numba#4628, #5124: layouts, read-only flags and shapes are no types."""
    run_script("no_recompile.py")
