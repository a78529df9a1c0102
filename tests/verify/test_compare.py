"""`run --compare`: faults planted in a contender's results are found, with their key tile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_prefix.__main__ import main
from numba_prefix.verify import compare as module
from numba_prefix.verify.compare import compare
from numba_prefix.verify.testing import Inputs, random_inputs

Q_LEN, KV_LEN = (3, 40), (20, 300)
TOKEN, HEAD, DIM = 3 + 25, 2, 7  # row 25 of sequence 1


@pytest.fixture
def inputs() -> Inputs:
    return random_inputs(
        Q_LEN, KV_LEN, head_num=4, kv_head_num=2, head_size=16, block_size=16, dtype="float16", mask_type="causal"
    )


def plant(monkeypatch: pytest.MonkeyPatch, value: float, keys: range | None = None, batch: int = 1) -> None:
    """Makes `vector` compute a wrong element of row 25 of the long sequence, in batches of at least
    so many sequences: whenever `keys` are attended to, or, if None, only with all keys."""
    honest = module._run

    def run(inputs: Inputs, name: str, num_threads: int | None, held_blocks: Any) -> tuple[Any, str]:
        out, reason = honest(inputs, name, num_threads, held_blocks)
        token = TOKEN if len(inputs.seq_len) > 1 else TOKEN - 3
        is_met = held_blocks is None if keys is None else held_blocks is None or held_blocks[0, keys[0] // 16]
        if name == "vector" and is_met and len(inputs.seq_len) >= batch:
            out[token, HEAD, DIM] = value
        return out, reason

    monkeypatch.setattr(module, "_run", run)


def test_all_is_right(inputs: Inputs) -> None:
    judged = compare(inputs, ["vector", "cpu", "reference"])
    assert [one.name for one in judged] == ["vector", "cpu", "reference"]
    assert all(one.error.ok and one.fault is None for one in judged)


@pytest.mark.parametrize("value", [9.0, np.nan, -np.inf])
def test_a_key_tile(inputs: Inputs, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, value, keys=range(128, 256))
    wrong, right = compare(inputs, ["vector", "reference"])
    assert right.fault is None
    fault = wrong.fault
    assert fault is not None
    assert (fault.sequence, fault.row, fault.head, fault.dim) == (1, 25, HEAD, DIM)
    assert (fault.keys, fault.is_alone) == ((128, 256), True)
    np.testing.assert_equal(fault.got, value)
    assert abs(fault.expected) < 2


def test_what_joins_the_tiles(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 9.0)
    (wrong,) = compare(inputs, ["vector"])
    assert wrong.fault is not None
    assert (wrong.fault.keys, wrong.fault.is_alone) == (None, True)


def test_what_batch_mates_share(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, 9.0, batch=2)
    (wrong,) = compare(inputs, ["vector"])
    assert wrong.fault is not None
    assert (wrong.fault.keys, wrong.fault.is_alone) == (None, False)


def test_on_the_command_line(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "case.npz"
    arrays = {name: value for name, value in inputs.arguments().items() if value is not None}
    np.savez(file, **(arrays | {"mask_type": "causal"}))
    assert main(["run", str(file), "--compare", "vector,reference"]) == 0
    assert capsys.readouterr().out.count("every element is right") == 2
    plant(monkeypatch, 9.0, keys=range(0, 128))
    assert main(["run", str(file), "--compare", "vector,reference"]) == 1
    said = capsys.readouterr().out
    assert "FIRST WRONG: sequence 1, row 25, head 2, element 7: got 9, expected " in said
    assert "first key tile that is wrong alone: keys 0 to 127" in said
    assert main(["run", str(file), "--compare", "vector", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["compared"][0]["fault"]["keys"] == [0, 128]


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--compare", "vector,sse"])
    assert "got 'sse', expected names of cpu, cuda, reference" in capsys.readouterr().err
    assert main(["run", "--compare", "vector", "--out", str(tmp_path / "x.npz")]) == 2
    assert main(["run", "--compare", "avx512_bf16"]) == 2  # the sample is float16
    assert "avx512_bf16" in capsys.readouterr().err
