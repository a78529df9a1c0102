"""Public bug reports of this field, second round (tests/semantics/bugs.md): what cached code is
keyed by (N13), installations without sources (N07), and threads with little stack."""

from __future__ import annotations

import compileall
import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import succeed
from kernel_stubs import spec_of
from numba import config
from processes import PYTHONPATH, ROOT, environment, run_script

from numba_prefix.cpu import speed_test
from numba_prefix.cpu.compile import cache
from numba_prefix.cpu.compile.jit import kernel
from numba_prefix.cpu.paths import PATHS
from numba_prefix.cuda.compile import cubins
from numba_prefix.cuda.compile.compiler import Compiled
from numba_prefix.runtime import disk_cache, numba_options

PACKAGE = ROOT / "numba_prefix"
OPTIONS = (
    {"NUMBA_OPT": "0"},
    {"NUMBA_OPT": "1"},
    {"NUMBA_DEBUGINFO": "1"},
    {"NUMBA_ENABLE_PROFILING": "1"},
    {"NUMBA_LLVM_PASS_TIMINGS": "1", "NUMBA_SLP_VECTORIZE": "1", "NUMBA_LOOP_VECTORIZE": "0"},
)

# --- N13: options


def halved(x: Any) -> Any:
    return x / 2


def thirded(x: Any) -> Any:
    return x / 3


def is_loaded(function: Callable[[Any], Any] = halved) -> bool:
    """Whether a new dispatcher finds its code on disk; what it computes is right in any case."""
    dispatcher = kernel(function)
    assert dispatcher(6) == function(6)
    return sum(dispatcher._cache_hits.values()) == 1


def in_new_process(monkeypatch: pytest.MonkeyPatch) -> bool:
    """The same, as a process that has compiled nothing yet would."""
    monkeypatch.setattr(cache, "_compiled_under", set())
    return is_loaded()


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """The number of files of a cache that plain processes use."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not in_new_process(monkeypatch) and in_new_process(monkeypatch)
    return lambda: len(list((tmp_path / "numba_prefix").iterdir()))


SHAPING = {
    "OPT": config._OptLevel(1),
    "DEBUGINFO_DEFAULT": 1,
    "LOOP_VECTORIZE": 0,
    "SLP_VECTORIZE": 1,
    "ENABLE_PROFILING": 1,
    "BOUNDSCHECK": 1,
    "DEBUG_JIT": 1,
    "EXTEND_VARIABLE_LIFETIMES": 1,
    "LLVM_REFPRUNE_FLAGS": "per_bb",
    "USING_SVML": True,
    "AN_OPTION_OF_A_LATER_NUMBA": 1,
}


@pytest.mark.parametrize("name", SHAPING)
def test_n13_options_have_code_of_their_own(
    name: str, count: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba#10821: a debugging session neither takes what others use nor leaves it to them."""
    with monkeypatch.context() as changed:
        changed.setattr(config, name, SHAPING[name], raising=False)
        assert not in_new_process(monkeypatch) and count() == 2
        assert in_new_process(monkeypatch) and count() == 2
    assert in_new_process(monkeypatch) and count() == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("THREADING_LAYER", "workqueue"), ("NUMBA_NUM_THREADS", 1), ("DISABLE_JIT", 1), ("COLOR_SCHEME", "dark_bg")],
)
def test_options_that_shape_nothing(
    name: str, value: Any, count: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread counts differ from machine to machine, and messages are not code."""
    monkeypatch.setattr(config, name, value)
    assert in_new_process(monkeypatch) and count() == 1


def test_options_that_a_program_changes(count: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled under others is linked by what comes later, which is therefore not kept."""
    monkeypatch.setattr(cache, "_compiled_under", set())
    with monkeypatch.context() as changed:
        changed.setattr(config, "DEBUGINFO_DEFAULT", 1)
        assert not is_loaded() and count() == 2
    assert is_loaded()  # as plain processes left it
    assert not is_loaded(thirded) and not is_loaded(thirded) and count() == 2


def test_n13_the_measured_path_is_not_that_of_slow_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a path is kept too: timed without optimisation, it says nothing to others."""
    keys = {speed_test._key("bfloat16", PATHS)}
    for level in (0, 1, 2):
        monkeypatch.setattr(config, "OPT", config._OptLevel(level))
        keys.add(speed_test._key("bfloat16", PATHS))
    assert len(keys) == 4


def test_n13_cubins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CUDA kernels are keyed by what the environment says, which needs no Numba to be read, and not
    kept where the program says otherwise."""
    made = Compiled("symbol", (8, 0), b"code", 128, 0, 64, 32, 40, 0, 0, 2)
    monkeypatch.setattr(cubins, "compile_kernel", lambda spec, cc: made)
    monkeypatch.setattr(cubins, "_ready", {})
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def source() -> str:
        cubins._ready.clear()
        monkeypatch.setattr(cubins, "_altered", set())
        return cubins.obtain(spec_of("scaled"), (8, 0))[1]

    assert [source(), source()] == ["compiled", "cache"]
    for name, shapes in (
        *(("NUMBA_BOUNDSCHECK", True), ("NUMBA_DEBUG_JIT", True), ("NUMBA_CUDA_DEBUGINFO", True)),
        *(("NUMBA_A_LATER_OPTION", True), ("NUMBA_CUDA_LOG_LEVEL", False), ("NUMBA_PREFIX_NUM_THREADS", False)),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(name, "1")
            changed.setattr(numba_options, "are_set_by_program", lambda: False)
            assert source() == ("compiled" if shapes else "cache"), name
            assert source() == "cache"
    with monkeypatch.context() as changed:
        changed.chdir(tmp_path)
        (tmp_path / ".numba_config.yaml").write_text("boundscheck: 1\n")
        assert source() == "compiled"
    shutil.rmtree(tmp_path / "numba_prefix")
    with monkeypatch.context() as changed:
        changed.setattr(config, "DEBUG_JIT", 1)
        assert [source(), source()] == ["compiled", "compiled"]
    assert [source(), source()] == ["compiled", "cache"]


def test_info_shows_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What makes a process compile code of its own can be seen."""
    monkeypatch.setenv("NUMBA_SLP_VECTORIZE", "1")
    assert succeed(capsys, "info")["environment"]["NUMBA_SLP_VECTORIZE"] == "1"


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) + "-".join(options.values()))
def test_n13_processes(options: dict[str, str], tmp_path: Path) -> None:
    """A process under other options ends, has the bits of a plain one, and what it leaves is taken
    by its like alone."""
    plain = environment(NUMBA_CACHE_DIR=str(tmp_path))
    theirs = plain | options
    outcomes = [json.loads(run_script("one_call.py", env=env)) for env in (theirs, plain, theirs, plain)]
    assert len({outcome["bits"] for outcome in outcomes}) == 1
    assert [outcome["passes"] > 0 for outcome in outcomes] == [True, True, False, False]


# --- N07: without sources


def install(top: Path, change: Callable[[Path], None] = lambda package: None) -> Path:
    """The package as bytecode alone."""
    package = top / "numba_prefix"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    change(package)
    assert compileall.compile_dir(package, quiet=2, legacy=True)
    for path in package.rglob("*.py"):
        path.unlink()
    return top


def run_in(where: Path, *arguments: str, **changes: str) -> str:
    """The output of Python with the package of `where`."""
    env = environment(**changes) | {"PYTHONPATH": os.pathsep.join([str(where), *PYTHONPATH[1:]])}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=where.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout


DIGESTS = """
from numba_prefix.cuda.compile.cubins import _digest
from numba_prefix.cpu.compile.cache import source_digest
import numba_prefix
print(numba_prefix.__file__.rpartition(".")[2], source_digest(), _digest())
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("bare"))


def test_n07_one_digest_in_all_processes(bare: Path, tmp_path: Path) -> None:
    """numba PR#1907, erlabpy PR#510: bytecode names its code by what it says, wherever it lies and
    whatever else a process has in memory, and other bytecode by another name."""
    found = run_in(bare, "-c", DIGESTS, PYTHONHASHSEED="1")
    assert found.startswith("pyc ")
    assert run_in(bare, "-c", "import numba_prefix.cpu.target, ml_dtypes" + DIGESTS, PYTHONHASHSEED="2") == found
    archive = tmp_path / "site.zip"
    with zipfile.ZipFile(archive, "w") as z:
        for path in bare.rglob("*.pyc"):
            z.write(path, path.relative_to(bare))
    assert run_in(archive, "-c", DIGESTS) == found

    def edit(package: Path) -> None:
        path = package / "rules" / "softmax.py"
        path.write_text(path.read_text() + "\n\ndef more(x):\n    return x in {1, 2.0, 'three'}\n")

    other = run_in(install(tmp_path / "other", edit), "-c", DIGESTS).split()
    assert not set(other[1:]) & set(found.split()[1:])


def test_n07_commands(bare: Path, tmp_path: Path) -> None:
    """`info` of an installation without sources shows a cache that is used."""
    report = json.loads(run_in(bare, "-m", "numba_prefix", "info", "--json", NUMBA_CACHE_DIR=str(tmp_path)))
    assert report["cache"]["is_writable"] and report["cache"]["obstacle"] == ""


@pytest.mark.parametrize("optimize", ["0", "2"])
def test_n07_the_second_process_loads(optimize: str, bare: Path, tmp_path: Path) -> None:
    """Right, and compiled once. Warm-up ends, for a GPU that is not here too."""
    changes = {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONOPTIMIZE": optimize}
    script = str(ROOT / "tests" / "support" / "scripts" / "one_call.py")
    outcomes = [json.loads(run_in(bare, script, **changes)) for _ in range(2)]
    assert [outcome["passes"] > 0 for outcome in outcomes] == [True, False]
    assert outcomes[0]["bits"] == outcomes[1]["bits"] == json.loads(run_script("one_call.py"))["bits"]
    warm = ("-m", "numba_prefix", "warmup", "--json", "--dtypes", "float16", "--head-sizes", "64")
    kernels = json.loads(run_in(bare, *warm, "--mask-types", "causal", **changes))["kernels"]
    assert {entry["source"] for entry in kernels} == {"cache"}
    if importlib.util.find_spec("numba_cuda") is not None:
        for source in ("compiled", "cache"):
            there = (*warm, "--mask-types", "causal", "--target", "cuda", "--cc", "8.0")
            kernels = json.loads(run_in(bare, *there, **changes))["kernels"]
            assert {entry["source"] for entry in kernels} == {source}


def test_assertions_are_part_of_the_code() -> None:
    """`python -O` leaves them out of what Numba compiles."""
    program = "from numba_prefix.runtime.disk_cache import digest_of; print(digest_of(['rules'], 1))"
    found = [run_in(ROOT, "-c", program, PYTHONOPTIMIZE=level) for level in ("0", "1", "2")]
    assert found[0] != found[1] == found[2]


@pytest.mark.parametrize("loader", ["no bytecode", "error"])
def test_where_code_cannot_be_named(
    loader: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loader that shows neither source nor bytecode: compiled each time, right, and `info` says
    it."""

    def get_code(self: Any, name: str) -> Any:
        if loader == "error":
            raise OSError("frozen")
        return None

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.machinery.SourceFileLoader, "get_source", lambda self, name: None)
    monkeypatch.setattr(importlib.machinery.SourceFileLoader, "get_code", get_code)
    cache.source_digest.cache_clear()
    try:
        assert not is_loaded() and not is_loaded()
        speed_test.save("bfloat16", PATHS, dict.fromkeys([path.name for path in PATHS], 1.0))
        assert speed_test.load("bfloat16", PATHS) is None
        report = succeed(capsys, "info")["cache"]
        assert report["state"].startswith("NOT USED, every process compiles: ")
        assert ("frozen" if loader == "error" else "neither source nor bytecode") in report["obstacle"]
        assert not list(tmp_path.rglob("*.bin"))
    finally:
        monkeypatch.undo()
        cache.source_digest.cache_clear()
    assert disk_cache.code_of("numba_prefix.rules.softmax") == (PACKAGE / "rules" / "softmax.py").read_bytes()


# --- little stack


@pytest.fixture(scope="module")
def roomy() -> str:
    return run_script("small_stack.py", 0, "main")


@pytest.mark.parametrize(("kib", "where"), [(64, "main"), (32, "thread"), (64, "thread")])
def test_small_stacks(kib: int, where: str, roomy: str) -> None:
    """threading.stack_size before the first call, made here or in such a thread, with helpers."""
    assert run_script("small_stack.py", kib, where) == roomy


def test_compilation_in_a_small_stack(tmp_path: Path, roomy: str) -> None:
    """LLVM's recursion has room of its own."""
    assert run_script("small_stack.py", 64, "thread", env=environment(NUMBA_CACHE_DIR=str(tmp_path))) == roomy
