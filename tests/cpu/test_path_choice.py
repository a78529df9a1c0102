"""The choice among paths: by measured speeds, once per machine and process, and whatever the disk
and the clock do."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import environment, run_script

from numba_prefix.cpu import isa, speed_test, target
from numba_prefix.cpu.paths import VECTOR, amx, avx512_bf16
from numba_prefix.cpu.paths import Path as IsaPath

BOTH = (avx512_bf16.PATH, VECTOR)
ALL = (amx.PATH, *BOTH)


class Clock:
    """Time that passes only while a path runs: by the path's seconds, times a factor for each
    run."""

    def __init__(self, seconds: dict[str, float], noise: Callable[[int], float] = lambda run: 1.0) -> None:
        self.seconds, self.noise = seconds, noise
        self.now, self.runs = 0.0, 0

    def prepare(self, path: IsaPath, case: Any) -> Callable[[], None]:
        def run() -> None:
            self.now += self.seconds[path.name] * self.noise(self.runs)
            self.runs += 1

        return run

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Has all paths, nothing on disk, and runs them as fast as a test says; counts measurements."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    monkeypatch.setattr(isa, "_missing", lambda path: "")
    monkeypatch.setattr(isa, "_wrong", {})
    monkeypatch.setattr(target, "_seconds", {})
    monkeypatch.setattr(target, "make_ready", lambda path: True)
    isa._usable_from.cache_clear()
    honest, measured = speed_test.measure, []

    def runs_at(seconds: dict[str, float]) -> list[str]:
        def measure(dtype: str, paths: Any, prepare: Any) -> dict[str, float]:
            measured.append(dtype)
            clock = Clock(seconds)
            return honest(dtype, paths, clock.prepare, clock)

        monkeypatch.setattr(speed_test, "measure", measure)
        return measured

    yield runs_at
    isa._usable_from.cache_clear()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 2.0), "avx512_bf16"),
        ((2.0, 1.0), "vector"),
        ((1.0, 1.0), "vector"),  # a tie
        ((1.0, 1.04), "vector"),  # within the margin
        ((1.0, 1.06), "avx512_bf16"),
    ],
)
def test_two(seconds: tuple[float, float], expected: str) -> None:
    assert speed_test.fastest(dict(zip(("avx512_bf16", "vector"), seconds, strict=True)), BOTH).name == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 3.0, 2.0), "amx"),
        ((2.0, 1.0, 3.0), "avx512_bf16"),
        ((1.0, 1.0, 1.0), "vector"),
        ((2.0, 3.0, 1.0), "vector"),
    ],
)
def test_three(seconds: tuple[float, ...], expected: str) -> None:
    assert speed_test.fastest(dict(zip((path.name for path in ALL), seconds, strict=True)), ALL).name == expected


@pytest.mark.parametrize("slow", [avx512_bf16.PATH, VECTOR])
def test_a_noisy_machine(slow: IsaPath) -> None:
    """Neighbours slow two of three runs five times: the least of the rounds still tells."""
    seconds = {path.name: 1.3 if path is slow else 1.0 for path in BOTH}
    clock = Clock(seconds, noise=lambda run: 1.0 if run % 3 == 0 else 5.0)
    measured = speed_test.measure("bfloat16", BOTH, clock.prepare, clock)
    assert measured == pytest.approx(seconds)
    assert speed_test.fastest(measured, BOTH) is not slow


def test_one_measurement(machine: Any) -> None:
    """A process measures once; the next one takes the kept answer, whatever it would measure."""
    measured = machine({"amx": 3.0, "avx512_bf16": 2.0, "vector": 1.0})
    assert [target.ready_path("bfloat16") for _ in range(3)] == [VECTOR] * 3
    assert measured == ["bfloat16"]
    target._seconds.clear()  # as in another process
    machine({"amx": 1.0, "avx512_bf16": 2.0, "vector": 3.0})
    assert target.ready_path("bfloat16") is VECTOR
    assert target.ready_path("float16") is amx.PATH  # no answer was kept for it
    assert measured == ["bfloat16", "float16"]
    assert target.measured("bfloat16") == {"amx": 3.0, "avx512_bf16": 2.0, "vector": 1.0}


def test_other_paths_are_another_question(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine({"amx": 3.0, "avx512_bf16": 1.0, "vector": 2.0})
    assert target.ready_path("bfloat16") is avx512_bf16.PATH
    isa.give_up(avx512_bf16.PATH, "it computes wrong results on this machine")
    assert target.ready_path("bfloat16") is VECTOR
    isa.give_up(amx.PATH, "so does it")
    monkeypatch.setattr(speed_test, "measure", None)  # one path is no choice
    assert target.ready_path("bfloat16") is VECTOR
    assert target.measured("bfloat16") == {}


def test_a_forced_path_is_not_measured(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(isa.VARIABLE, "avx512_bf16")
    assert target.ready_path("bfloat16") is avx512_bf16.PATH
    assert target.ready_path("float16") is VECTOR


def test_threads_agree(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask at once get one answer, though the second measurement would say
    otherwise."""
    answers = iter([{"amx": 2.0, "avx512_bf16": 2.0, "vector": 1.0}, {"amx": 1.0, "avx512_bf16": 2.0, "vector": 3.0}])
    monkeypatch.setattr(speed_test, "measure", lambda *_: next(answers))
    barrier, found = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        found.append(target.ready_path("bfloat16"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [VECTOR] * 8


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions of POSIX")
def test_without_a_place_to_keep_it(machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "a file" / "below"))
    (tmp_path / "a file").write_text("")
    measured = machine({"amx": 2.0, "avx512_bf16": 1.0, "vector": 3.0})
    for _ in range(2):
        assert target.ready_path("bfloat16") is avx512_bf16.PATH
    assert measured == ["bfloat16"]


@pytest.mark.parametrize(
    "kept",
    [
        b"",
        b"null",
        b"[1, 2]",
        b'{"vector": 1.0}',
        b'{"amx": 1.0, "avx512_bf16": 1, "vector": 1.0}',
        b'{"amx": 1.0, "avx512_bf16": NaN, "vector": 1.0}',
        b'{"amx": 1.0, "avx512_bf16": -1.0, "vector": 1.0}',
    ],
)
def test_a_senseless_answer_is_not_taken(kept: bytes, machine: Any) -> None:
    measured = machine({"amx": 3.0, "avx512_bf16": 2.0, "vector": 1.0})
    speed_test.disk_cache.save(speed_test.NAME, speed_test._key("bfloat16", ALL), kept)
    assert target.ready_path("bfloat16") is VECTOR
    assert measured == ["bfloat16"]
    speed_test.save("bfloat16", ALL, {"amx": 1.0, "avx512_bf16": 2.0, "vector": 3.0})
    assert json.loads(speed_test.disk_cache.load(speed_test.NAME, speed_test._key("bfloat16", ALL)) or b"") == {
        "amx": 1.0, "avx512_bf16": 2.0, "vector": 3.0,
    }  # fmt: skip


def test_on_this_machine() -> None:
    """A second process of the same machine takes the path that the first one measured."""
    env = environment(NUMBA_PREFIX_ISA=None)
    said = {run_script("chosen_path.py", env=env) for _ in range(2)}
    assert len(said) == 1
