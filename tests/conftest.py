"""Targets under test, what a plain run leaves out, hypothesis profiles, and one compile cache for
the whole session."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import full
import pytest
from hypothesis import HealthCheck, settings

KERNELS = ("cpu",)
TARGETS = ("reference", *KERNELS)
# The CUDA target takes part where its kernels can be compiled: on a fake GPU that interprets them,
# so in tiny problems only, and on few kernels, since each takes seconds to compile.
if importlib.util.find_spec("numba_cuda"):
    TARGETS = (*TARGETS, "cuda")
TINY = {"dtype": {"float16"}, "head_size": {16}, "heads": {(8, 4), (12, 1), (3, 1)}, "block_size": {3, 128}}
FILES_WITH_TINY_TESTS = {"test_semantics.py"}

_quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", max_examples=40, derandomize=True, print_blob=True, **_quiet)
settings.register_profile("short", max_examples=10, derandomize=True, **_quiet)
settings.register_profile("dev", max_examples=40, **_quiet)
settings.register_profile("long", max_examples=1000, **_quiet)

# A shell ignores Ctrl-C in what it starts in the background, and so would every program that the
# tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set before the package and Numba are imported, so that this process and its children share what is
# compiled; never a cache of an earlier session unless the caller names one.
_own_cache = None
if "NUMBA_CACHE_DIR" not in os.environ:
    _own_cache = os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="numba_prefix_tests_")


ALL_TESTS = pytest.StashKey[list[pytest.Item]]()
NUM_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="all tests; with -m full, those that a plain run leaves out")


def pytest_configure(config: pytest.Config) -> None:
    thorough = "ci" if os.environ.get("CI") else "dev"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", thorough if config.option.full else "short"))


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect(config, items, [item for item in items if is_too_large(item)])
    config.stash[ALL_TESTS] = items[:]
    left_out = [item for item in items if full.is_left_out(item)]
    for item in (*left_out, *filter(full.is_repeated, items)):
        item.add_marker("full")
    is_plain = not config.option.full and not any("::" in argument for argument in config.args)
    config.stash[NUM_LEFT_OUT] = len(left_out) if is_plain else 0
    if is_plain:
        deselect(config, items, left_out)


def deselect(config: pytest.Config, items: list[pytest.Item], some: list[pytest.Item]) -> None:
    gone = set(some)
    config.hook.pytest_deselected(items=some)
    items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if left_out := config.stash.get(NUM_LEFT_OUT, 0):
        terminalreporter.line(f"{left_out} slow tests were left out (tests/README.md says which); --full runs them too")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Kernels that take seconds each to compile are begun with: build_ahead() of a file is told its
    tests."""
    if session.config.option.collectonly:
        return
    modules: dict[Any, list[pytest.Item]] = {}
    for item in session.items:
        module = getattr(item, "module", None)
        if hasattr(module, "build_ahead"):
            modules.setdefault(module, []).append(item)
    for module, items in modules.items():
        module.build_ahead(items)


def pytest_sessionfinish() -> None:
    if "cuda_target" in sys.modules:
        sys.modules["cuda_target"].forget_ahead()


def pytest_unconfigure(config: Any) -> None:
    if _own_cache is not None:
        shutil.rmtree(_own_cache, ignore_errors=True)


def is_too_large(item: pytest.Item) -> bool:
    """Whether a test on all targets has a problem that would be interpreted for long, or takes a
    kernel of its own."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("target") != "cuda":
        return False
    is_tiny = all(value in TINY[name] for name, value in callspec.params.items() if name in TINY)
    return item.path.name not in FILES_WITH_TINY_TESTS or not is_tiny


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    """Every implementation of the contract."""
    return request.param


@pytest.fixture(scope="session", params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    """The compiled targets: what only they promise (bits, buffers, threads)."""
    return request.param


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fake GPU (fake_gpu.py) that does all at once."""
    yield from _fake_gpu(monkeypatch)


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A GPU that is behind: nothing is done before it is waited for."""
    yield from _fake_gpu(monkeypatch, is_lazy=True)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A GPU that does nothing, for tests that look at launches alone."""
    yield from _fake_gpu(monkeypatch, execute=lambda *_: None)


def _fake_gpu(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Any]:
    import fake_gpu

    from numba_prefix.cuda import target

    yield fake_gpu.install(monkeypatch, **options)
    target._pending.calls.clear()


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    """transformers knows this package's attention."""
    integration = pytest.importorskip("numba_prefix.integrations.transformers")
    integration.register()
    yield
    integration.unregister()
