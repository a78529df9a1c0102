"""Targets under test, hypothesis profiles, and one compile cache for the whole session."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

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
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# A shell ignores Ctrl-C in what it starts in the background, and so would every program that the
# tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set before the package and Numba are imported, so that this process and its children share what is
# compiled; never a cache of an earlier session unless the caller names one.
_own_cache = None
if "NUMBA_CACHE_DIR" not in os.environ:
    _own_cache = os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="numba_prefix_tests_")


MANY_TESTS = 20


def pytest_collection_finish(session: pytest.Session) -> None:
    """The kernels of a file that takes minutes to compile them are begun with, if much of it is
    run."""
    items = [item for item in session.items if item.path.name == "test_cuda_kernels.py"]
    if len(items) > MANY_TESTS and not session.config.option.collectonly:
        items[0].module.build_ahead()  # type: ignore[attr-defined]


def pytest_sessionfinish() -> None:
    if "cuda_target" in sys.modules:
        sys.modules["cuda_target"].forget_ahead()


def pytest_unconfigure(config: Any) -> None:
    if _own_cache is not None:
        shutil.rmtree(_own_cache, ignore_errors=True)


def _is_tiny(item: pytest.Item) -> bool:
    params = getattr(item, "callspec").params  # noqa: B009
    return item.path.name in FILES_WITH_TINY_TESTS and all(
        value in TINY[name] for name, value in params.items() if name in TINY
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def is_left_out(item: pytest.Item) -> bool:
        callspec = getattr(item, "callspec", None)
        return callspec is not None and callspec.params.get("target") == "cuda" and not _is_tiny(item)

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]


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
