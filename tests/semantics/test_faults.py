"""Faults that a review found: what each of them did is in the docstring of its test."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from cases import Case, make_case, run, same_bits
from processes import environment, finish

import numba_prefix as nbp

SHAPES = {"few": ([3], [40]), "tile": ([70], [200])}


def planned(case: Case, **extra: Any) -> tuple[int, nbp.Op, np.ndarray]:
    out = np.full(case.query.shape, np.nan, case.query.dtype)
    arguments = case.arguments() | {"head_num": None, "kv_head_num": None, "attn_out": out} | extra
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(**arguments)
    return size, op, out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("qk_scale", [1e-60, -1e-50, 1e-46])
def test_scale_below_float32(target: str, shape: str, qk_scale: float) -> None:
    """A scale that float32 rounds to zero: masked keys weighed exp2(-inf * 0), NaN for every row.
    It is a zero scale."""
    case = make_case(*SHAPES[shape])
    results = [run(case, target, return_lse=True, qk_scale=scale) for scale in (qk_scale, 0.0)]
    for got, expected in zip(*results, strict=True):
        assert np.isfinite(got).all()
        same_bits(got, expected)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("block", [-1, 2**31 - 1])
def test_table_changed_after_planning(kernel: str, again: bool, block: int) -> None:
    """A bad id written into the table after it was checked was followed, out of the cache: the
    process died."""
    case = make_case([2, 33], [40, 70])
    tables = case.block_tables.copy()
    size, op, out = planned(case, block_tables=tables, context=nbp.Context(target=kernel))
    if again:
        op.run()
    good, tables[1, 2] = tables[1, 2], block
    out[...] = np.nan
    with pytest.raises(ValueError, match=rf"block_tables: got block {block} for sequence 1, column 2"):
        op.run()
    with pytest.raises(ValueError, match="block_tables"):
        nbp.self_attention_prefix_encoder(bytearray(size), size, op)
    assert np.isnan(out).all()
    tables[1, 2] = good
    op.run()
    same_bits(out, run(case, kernel))


def test_copied_table_changed_before_rebind(kernel: str) -> None:
    """The same for an int64 table, which is copied again when anything is bound."""
    case = make_case([2, 33], [40, 70])
    tables = case.block_tables.astype(np.int64)
    _, op, out = planned(case, block_tables=tables, context=nbp.Context(target=kernel))
    tables[0, 0] = 2**40
    op.rebind(query=case.query.copy())
    with pytest.raises(ValueError, match=f"got block {2**40} for sequence 0, column 0"):
        op.run()
    assert np.isnan(out).all()


def test_wide_table_changed_after_planning(kernel: str) -> None:
    """The same for a large table with junk in its tail."""
    case = make_case([2, 33], [40, 70])
    tables = np.full((2, 10_000), -7, np.int32)
    tables[:, : case.block_tables.shape[1]] = case.block_tables
    _, op, out = planned(case, block_tables=tables, context=nbp.Context(target=kernel))
    op.run()
    same_bits(out, run(case, kernel))
    tables[0, 0] = case.key.shape[0]
    with pytest.raises(ValueError, match="sequence 0, column 0"):
        op.run()


@pytest.mark.parametrize("context", ["cpu", 5, 0, {}])
def test_context_of_another_type(context: Any) -> None:
    """AttributeError from within, or silently taken for no context where it was false."""
    case = make_case([2], [9])
    with pytest.raises(TypeError, match=r"context: got (str|int|dict), expected a Context"):
        planned(case, context=context)
    size, op, _ = planned(case)
    with pytest.raises(TypeError, match=r"context: got (str|int|dict), expected a Context"):
        nbp.self_attention_prefix_encoder(bytearray(size), size, op, context)


def test_context_of_the_second_phase(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its num_threads and stream were neither used nor looked at."""
    from numba_prefix.cpu import target as launch

    case = make_case([300], [2000], head_num=8, head_size=64)
    size, op, out = planned(case, context=nbp.Context(target=kernel, num_threads=3))
    asked: list[int] = []
    together = launch.run_together
    monkeypatch.setattr(launch, "run_together", lambda task, n: (asked.append(n), together(task, n)))
    for num_threads in (None, 1, 2, 9):
        context = None if num_threads is None else nbp.Context(num_threads=num_threads)
        nbp.self_attention_prefix_encoder(bytearray(size), size, op, context)
    assert asked == [3, 1, 2, 3]
    for bad, error in ((nbp.Context(num_threads="2"), TypeError), (nbp.Context(stream=7), ValueError)):
        with pytest.raises(error, match=r"num_threads|stream"):
            nbp.self_attention_prefix_encoder(bytearray(size), size, op, bad)
    same_bits(out, run(case, kernel))


def test_a_call_within_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that a signal handler makes while its thread computes had the same workspace as the
    call it interrupts; so had the call after one whose wait for its helpers was interrupted."""
    from numba_prefix.cpu import target as launch

    case = make_case([3], [40])
    used: list[int] = []
    real = launch.run

    def interrupted(plan: Any, bound: Any, address: int, *rest: Any) -> None:
        used.append(address)
        if len(used) == 1:
            run(case, "cpu")
        real(plan, bound, address, *rest)

    monkeypatch.setattr(launch, "run", interrupted)
    run(case, "cpu")
    assert len(set(used)) == 2
    run(case, "cpu")
    assert used[2] in used[:2]


def test_interruption_at_the_end_of_a_wait() -> None:
    """Ctrl-C between a wait's success and its being noted: the wait for the helpers was begun
    again, and never ended."""
    from numba_prefix.runtime.pool import _Job

    class Interrupted:
        def __init__(self, lock: Any) -> None:
            self.lock, self.is_first = lock, True

        def acquire(self) -> bool:
            self.lock.acquire()
            if self.is_first:
                self.is_first = False
                raise KeyboardInterrupt
            return True

        def release(self) -> None:
            self.lock.release()

    begun, may_end, caught = threading.Event(), threading.Event(), threading.Event()
    job = _Job(lambda worker: (begun.set(), may_end.wait()))  # type: ignore[arg-type, return-value]
    job.done = Interrupted(job.done)  # type: ignore[assignment]

    def caller() -> None:
        try:
            job.close()
        except KeyboardInterrupt:
            caught.set()

    threads = [threading.Thread(target=f, daemon=True) for f in (lambda: job.help(1), caller)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    assert not caught.wait(0.1)
    may_end.set()
    assert caught.wait(10)


@pytest.mark.parametrize("given", ["key", "value"])
def test_new_tokens_in_the_other_cache(given: str) -> None:
    """New values that lie in the cache of the keys were read after keys had been written over
    them."""
    key_cache, value_cache = (np.zeros((2, 4, 1, 8), np.float32) for _ in range(2))
    new = {"key": np.ones((4, 1, 8), np.float32), "value": np.ones((4, 1, 8), np.float32)}
    new[given] = (value_cache if given == "key" else key_cache)[1]
    with pytest.raises(ValueError, match=f"_cache: got memory shared with {given}"):
        nbp.reshape_and_cache(new["key"], new["value"], key_cache, value_cache, np.arange(4, 8))
    assert not key_cache.any() and not value_cache.any()


@pytest.mark.parametrize("shape", [(0, 4, 8), (0, 32)])
def test_merge_of_no_tokens(shape: tuple[int, ...]) -> None:
    """NumPy's "cannot reshape array of size 0"."""
    out, lse = np.zeros(shape, np.float32), np.zeros((0, 4), np.float32)
    merged = nbp.merge_states(out, lse, out, lse)
    assert merged[0].shape == shape and merged[1].shape == (0, 4)


def test_merge_of_bfloat16_without_ml_dtypes() -> None:
    """torch's bfloat16 was merged as the integers that its bits are: 1 and -1 to infinity."""
    pytest.importorskip("torch")
    code = """
import sys
sys.modules["ml_dtypes"] = None
import torch
import numba_prefix as nbp
a, b = (torch.tensor([[[x, y]]], dtype=torch.bfloat16) for x, y in ((1.0, 3.0), (-1.0, float("nan"))))
out, lse = nbp.merge_states(a, torch.zeros(1, 1), b, torch.zeros(1, 1))
assert out.dtype == torch.bfloat16 and out[0, 0, 0] == 0 and out[0, 0, 1].isnan(), out
"""
    finish(subprocess.Popen([sys.executable, "-c", code], env=environment(), stderr=subprocess.PIPE, text=True))
