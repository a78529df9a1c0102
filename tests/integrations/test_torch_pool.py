"""PyTorch's threads lent for a call (Context.pool): the same bits, and nothing left behind,
whatever ends the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import make_case
from processes import run_script

import numba_prefix as nbp
from numba_prefix.runtime import openmp

torch = pytest.importorskip("torch")

CASE = make_case([150, 3], [300, 400], head_num=8, kv_head_num=2, head_size=64)


def planned(out: Any, **context: Any) -> nbp.Op:
    given = CASE.arguments()
    return nbp.self_attention_prefix_encoder_get_workspace_size(
        *(given.get(name) for name in ("query", "key", "value", "block_tables", "mask", "seq_len", "kv_seq_len")),
        *(given.get(name) for name in ("slopes", "mask_type", "head_num", "kv_head_num", "qk_scale")), out,
        nbp.Context(**context),
    )[1]  # fmt: skip


def output(num_threads: int, pool: str) -> Any:
    out = np.full_like(CASE.query, np.nan)
    planned(out, target="cpu", num_threads=num_threads, pool=pool).run()
    return out


@pytest.mark.parametrize("num_threads", [1, 2, 5, None])
def test_same_bits(num_threads: int) -> None:
    torch.ones(1 << 20).sum()
    assert output(num_threads, "torch").tobytes() == output(1, "own").tobytes()


@pytest.mark.parametrize("mode", ["fork", "interrupted", "handled", "threads"])
def test_ended(mode: str) -> None:
    """In a process of its own, that has two threads of PyTorch: fork: a child of it; interrupted:
    Ctrl-C; handled: a call by a signal handler; threads: calls of six threads."""
    said = run_script("torch_pool.py", mode).strip()
    if said != "right":
        pytest.skip(said)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No team of PyTorch's: own threads, the same bits."""
    monkeypatch.delitem(openmp.sys.modules, "torch")
    assert openmp.team(None) is None
    assert output(2, "torch").tobytes() == output(1, "own").tobytes()


def test_other_openmp_is_left_alone(tmp_path: Any) -> None:
    assert openmp._library(tmp_path / "libtorch_cpu.so") is None  # none
    own = openmp.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    other = openmp.Path(torch.__file__).parent / "lib" / "libc10.so"  # loaded, but uses none
    found = openmp._library(own)
    assert found is None or found.omp_get_max_threads() == torch.get_num_threads()
    if other.exists():
        assert openmp._library(other) is None


@pytest.mark.parametrize("pool", ["", "TORCH", "openmp", 2, None])
def test_refused(pool: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="^pool: got .*expected .*'own', 'torch'"):
        planned(np.empty_like(CASE.query), pool=pool)


def test_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match="^pool: got 'torch', expected 'own' for target 'reference'"):
        planned(np.empty_like(CASE.query), target="reference", pool="torch")
