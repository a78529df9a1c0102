"""Public bug reports of this field as cases, D23 to D31 of tests/semantics/bugs.md: threads,
caches, compilation in services."""

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
from faults import ANY_LAYER, fault
from layers import LAYERS, has_layer, library_path, under
from processes import PYTHONPATH, ROOT, environment, finish, run_script, start

CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24
PACKAGE = ROOT / "numba_prefix"
IS_LINUX = sys.platform.startswith("linux")
pytestmark = pytest.mark.skipif(not IS_LINUX, reason="uses /proc, fork, capabilities and CPU affinity")


def outcome(output: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert result["error"] < 2e-3, result
    return result


@pytest.fixture(scope="module")
def expected() -> str:
    """The bits of scripts/one_call.py in an ordinary process."""
    bits: str = outcome(run_script("one_call.py"))["bits"]
    return bits


# --- D24: threads; D23 is in test_service.py, and in the cold start below


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("capped", {"NUMBA_NUM_THREADS": "1"}),
        ("many", {"NUMBA_NUM_THREADS": "64"}),
        ("mask", {}),
        ("mask", {"NUMBA_NUM_THREADS": "1"}),
    ],
)
def test_d24_thread_cap(mode: str, changes: dict[str, str]) -> None:
    """numba#10491, abTEM PR#441: the cap holds in pool threads too, and Numba's own mask stays the
    caller's."""
    run_script("thread_caps.py", mode, env=environment(**changes))


def test_d24_affinity_is_the_cap() -> None:
    """A process bound to one CPU uses one thread."""
    run_script("thread_caps.py", "capped", "pinned")


# --- D25, D26: the compile cache


def bound_by_permissions() -> None:
    """Root writes where it pleases; without this capability it is stopped by permissions as anybody
    is."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def start_in(where: Path, *arguments: str, script: str = "one_call.py", **changes: str | None) -> Any:
    """A script with the package of `where`, in a home that cannot be written."""
    home = where.parent / "home"
    home.mkdir(exist_ok=True)
    home.chmod(0o555)
    env = environment(HOME=str(home), XDG_CACHE_HOME=None, **changes)
    env["PYTHONPATH"] = os.pathsep.join([str(where), *PYTHONPATH[1:]])
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


def in_each_layer() -> str:
    return "layers=" + ",".join(filter(has_layer, LAYERS))


@pytest.fixture(scope="module")
def uncached(read_only_install: Path) -> dict[str, Any]:
    """What one call does where no cache can be had."""
    changes = {"NUMBA_CACHE_DIR": None, "LD_LIBRARY_PATH": library_path()}
    return outcome(finish(start_in(read_only_install, "--flags", in_each_layer(), **changes)))


@pytest.mark.parametrize("layer", LAYERS)
def test_d25_read_only_install(layer: str, uncached: dict[str, Any], read_only_install: Path, expected: str) -> None:
    """numba#4908, #4032: nothing can be written anywhere: import and call work, uncached."""
    with fault("nowhere", layer):
        under(layer)
        assert uncached["layers"][layer] == 0, f"exit status {uncached['layers'][layer]}"
        assert uncached["where"] == str(read_only_install / "numba_prefix")
        assert uncached["bits"] == expected
        assert uncached["passes"] > 0
        assert not list(read_only_install.rglob("__pycache__"))


@pytest.fixture(scope="module")
def from_zip(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Path]:
    """The package in a zip archive, a NUMBA_CACHE_DIR that cannot be written, and Ctrl-C during the
    first call."""
    top = tmp_path_factory.mktemp("zip")
    archive, cache = top / "site.zip", top / "cache"
    with zipfile.ZipFile(archive, "w") as z:
        for path in PACKAGE.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                z.write(path, path.relative_to(ROOT))
    cache.mkdir(mode=0o555)
    changes = {"NUMBA_CACHE_DIR": str(cache), "LD_LIBRARY_PATH": library_path()}
    return outcome(finish(start_in(archive, "--interrupt", in_each_layer(), **changes))), archive, cache


@pytest.mark.parametrize("layer", LAYERS)
def test_d25_import_from_a_zip(layer: str, from_zip: tuple[dict[str, Any], Path, Path], expected: str) -> None:
    result, archive, cache = from_zip
    with fault("zip", layer):
        under(layer)
        assert result["layers"][layer] == 0, f"exit status {result['layers'][layer]}"
        assert result["where"].startswith(str(archive)) and result["bits"] == expected
        assert not list(cache.iterdir())


def test_first_call_interrupted(from_zip: tuple[dict[str, Any], Path, Path], expected: str) -> None:
    """From the import of Numba to the last compiler pass: each Ctrl-C was raised, and what it left
    was whole."""
    with fault("ctrl_c_first"):
        result = from_zip[0]
        assert result["interrupted"] > 10
        assert result["bits"] == expected and result["passes"] == 0


@pytest.fixture(scope="module")
def filled_cache(read_only_install: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A NUMBA_CACHE_DIR that a process per layer found empty and filled at the same time, in each
    eight threads that make the first call together (D23: numba#2804, #908); and what each of them
    wrote."""
    cache = tmp_path_factory.mktemp("cache")
    changes = {"NUMBA_CACHE_DIR": str(cache), "LD_LIBRARY_PATH": library_path(), "NUMBA_NUM_THREADS": "2"}
    started = {
        layer: start_in(
            read_only_install, script="many_threads.py", **changes,
            NUMBA_THREADING_LAYER=None if layer == ANY_LAYER else layer,
        )
        for layer in filter(has_layer, LAYERS)
    }  # fmt: skip
    said = {}
    for layer, process in started.items():
        try:
            said[layer] = finish(process, timeout=240)
        except AssertionError as error:
            said[layer] = str(error)
    return cache, said


@pytest.mark.parametrize("layer", LAYERS)
def test_d26_first_calls_at_once(layer: str, filled_cache: tuple[Path, dict[str, str]]) -> None:
    with fault("cold", layer):
        under(layer)
        said = filled_cache[1][layer]
        assert said == "right\n", said


@pytest.mark.parametrize("threads", ["1", "16"])
def test_d26_cold_start_of_several_processes(
    filled_cache: tuple[Path, dict[str, str]], read_only_install: Path, expected: str, threads: str
) -> None:
    """numba#4807, #7518, and D25 with NUMBA_CACHE_DIR: what they left is used by the next, with any
    thread count."""
    cache, _ = filled_cache
    assert [path for path in cache.rglob("*") if path.is_file()]
    changes = {"NUMBA_CACHE_DIR": str(cache), "NUMBA_NUM_THREADS": threads}
    result = outcome(finish(start_in(read_only_install, f"num_threads={threads}", **changes)))
    assert result["bits"] == expected and result["passes"] == 0


# --- D27, D30, D31: compilation


def test_d27_no_relaxed_arithmetic(uncached: dict[str, Any]) -> None:
    """numba#6217, #8708: no kernel may assume that NaN and infinity do not occur."""
    assert uncached["dispatchers"] > 0 and uncached["llvm_bytes"] > 0
    assert uncached["fastmath"] == [] and uncached["lines"] == []


OTHER_WAYS = ("NUMBA_BOUNDSCHECK", "NUMBA_DISABLE_JIT")


@pytest.fixture(scope="module")
def cache_of_other_ways(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache of what is compiled with each of these variables set."""
    cache = str(tmp_path_factory.mktemp("other_ways"))
    for variable in OTHER_WAYS:
        run_script("one_call.py", env=environment(NUMBA_CACHE_DIR=cache, **{variable: "1"}))
    return cache


@pytest.mark.parametrize("variable", OTHER_WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_d30_other_ways_to_run(layer: str, variable: str, cache_of_other_ways: str) -> None:
    """numba#9638, #8028: with bounds checks, and with JIT switched off for the user's functions:
    the same answers."""
    dtypes = [] if layer == ANY_LAYER else ["float16"]
    with fault(variable.removeprefix("NUMBA_").lower(), layer):
        env = under(layer, NUMBA_CACHE_DIR=cache_of_other_ways, **{variable: "1"})
        run_script("agree.py", "cpu", *dtypes, env=env)


def test_d31_no_compilation_after_the_warm_up() -> None:
    """numba#4628, #5124: layouts, read-only flags and shapes are no types."""
    run_script("no_recompile.py")
