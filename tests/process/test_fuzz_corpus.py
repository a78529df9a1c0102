"""Inputs that coverage-guided fuzzing kept, replayed without atheris; and the targets notice what
they are for."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_atheris import CORPUS, Bytes, mutated_archive, targets

from numba_prefix.cpu.target import CpuTarget
from numba_prefix.front import encoder
from numba_prefix.inputs.arrays import as_numpy

TARGETS = targets(Bytes)
KEPT = {name: sorted((CORPUS / name).iterdir()) for name in TARGETS}


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    assert len(KEPT[name]) > 5
    for path in KEPT[name]:
        TARGETS[name](path.read_bytes())


@pytest.mark.parametrize("name", ["one_call", "two_phases"])
def test_corpus_reaches_results_and_errors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some inputs change nothing or something harmless, others are refused: by TypeError, by
    ValueError."""
    outcomes: list[str] = []
    honest = encoder.static_problem

    def watched(*arguments: Any, **rest: Any) -> Any:
        try:
            found = honest(*arguments, **rest)
        except Exception as error:
            outcomes.append(type(error).__name__)
            raise
        outcomes.append("done")
        return found

    monkeypatch.setattr(encoder, "static_problem", watched)
    for path in KEPT[name]:
        TARGETS[name](path.read_bytes())
    assert {"done", "TypeError", "ValueError"} <= set(outcomes), outcomes


@pytest.mark.parametrize("name", ["one_call", "two_phases"])
@pytest.mark.parametrize("what", ["another exception", "nameless", "wrong", "NaN"])
def test_what_the_targets_notice(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = CpuTarget.run

    def broken(self: CpuTarget, *arguments: Any) -> None:
        if what == "another exception":
            raise IndexError("list index out of range")
        if what == "nameless":
            raise ValueError("bad")
        honest(self, *arguments)
        out = as_numpy(self._bound[1].out)
        if out.size:
            out.flat[0] = np.nan if what == "NaN" else out.flat[0] + 1

    monkeypatch.setattr(CpuTarget, "run", broken)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        for path in KEPT[name]:
            TARGETS[name](path.read_bytes())


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris")
def test_stand_in_reads_as_atheris_does() -> None:
    import atheris

    rng = random.Random(0)
    for _ in range(2000):
        data = rng.randbytes(rng.randrange(30))
        theirs, mine = atheris.FuzzedDataProvider(data), Bytes(data)
        for _ in range(12):
            count, low = rng.randrange(9), rng.randrange(-5, 5)
            high = low + rng.choice([0, 1, 5, 255, 256, 70_000])
            assert theirs.ConsumeBytes(count) == mine.ConsumeBytes(count)
            assert theirs.ConsumeIntInRange(low, high) == mine.ConsumeIntInRange(low, high)


def test_mutated_archives_are_archives() -> None:
    """What the fuzzer tries of npz files is, more often than not, read beyond the archive's own
    directory."""
    data = Path(KEPT["npz"][0].with_name("causal.npz")).read_bytes()
    made = [mutated_archive(data, 8192, seed) for seed in range(20)]
    assert len(set(made)) > 10 and all(x.startswith(b"PK") for x in made)
