"""Block tables on a GPU: who learns of a bad id, and when; and calls for a part of the blocks. On a
fake GPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cases import assert_close, make_case, naming, run, with_mask
from device_arrays import DeviceArray
from fake_gpu import SHORT, buffer, case_of, on_gpu, planned, spoilt
from ptx.device import FakeDriver

import numba_prefix as nbp
from numba_prefix.cuda import target
from numba_prefix.front.encoder import plan_partial
from numba_prefix.front.operation import Context

BAD_BLOCK = ("block_tables: got block 9999 for sequence 2, column 1", "0 to")


def test_bad_block_is_told_by_the_next_run(lazy: FakeDriver) -> None:
    case = case_of(lengths=SHORT)
    table = DeviceArray(lazy, spoilt(case).block_tables)
    size, op, out = planned(lazy, case, block_tables=table)
    workspace, _ = buffer(lazy, size)
    lazy.log.clear()
    op.run(workspace)
    op.run(workspace)  # nothing is known yet, and nothing waited for
    assert lazy.names("synchronize", "to_host", "finish") == []
    lazy.finish_all()
    with pytest.raises(ValueError, match=naming(*BAD_BLOCK)):
        op.run(workspace)
    assert len(lazy.launches) == 2
    table.array[2, 1] = case.block_tables[2, 1]
    op.run(workspace)
    op.check()
    assert_close(out.array, case)


@pytest.mark.parametrize("how", ["check", "rebind", "second phase"])
def test_bad_block_is_told_by(lazy: FakeDriver, how: str) -> None:
    case = case_of(lengths=SHORT)
    size, op, _ = planned(lazy, case, block_tables=DeviceArray(lazy, spoilt(case).block_tables))
    workspace, _ = buffer(lazy, size)
    op.run(workspace)
    if how != "check":
        lazy.finish_all()
    with pytest.raises(ValueError, match=naming(*BAD_BLOCK)):
        if how == "check":
            op.check()
        elif how == "rebind":
            op.rebind(block_tables=DeviceArray(lazy, case.block_tables))
        else:
            nbp.self_attention_prefix_encoder(workspace, size, op)
    op.check()


def test_bad_block_of_a_table_that_was_bound_before(lazy: FakeDriver) -> None:
    case = case_of(lengths=SHORT)
    _, op, _ = planned(lazy, case, block_tables=DeviceArray(lazy, spoilt(case).block_tables))
    op.run()
    op.rebind(block_tables=DeviceArray(lazy, case.block_tables)).run()
    with pytest.raises(ValueError, match=naming(*BAD_BLOCK)):
        op.check()


def test_bad_block_that_is_gone_by_then(fake: FakeDriver) -> None:
    case = case_of(lengths=SHORT)
    table = DeviceArray(fake, spoilt(case).block_tables)
    _, op, _ = planned(fake, case, block_tables=table)
    op.run()
    table.array[...] = case.block_tables
    with pytest.raises(ValueError, match=naming("block_tables", "changed since", f"0 to {len(case.key) - 1}")):
        op.check()


def test_bad_block_of_a_strided_table(fake: FakeDriver) -> None:
    case = case_of(lengths=SHORT)
    wide = np.zeros((8, 2 * case.block_tables.shape[1]), np.int32)
    wide[::-2, ::2] = spoilt(case).block_tables
    _, op, _ = planned(fake, case, block_tables=DeviceArray(fake, wide[::-2, ::2]))
    op.run()
    with pytest.raises(ValueError, match=naming(*BAD_BLOCK)):
        op.check()


@pytest.mark.parametrize("validate", ["full", "wait", "shape"])
def test_one_call_and_bad_blocks(lazy: FakeDriver, validate: str) -> None:
    """ "wait" tells at once, "full" at the thread's next call, "shape" never; bad blocks count as
    zeros."""
    case = case_of(lengths=SHORT)
    bad, good = on_gpu(lazy, spoilt(case)), on_gpu(lazy, case)
    if validate == "wait":
        with pytest.raises(ValueError, match=naming(*BAD_BLOCK)):
            nbp.prefix_encoder(**bad, validate=validate)
    else:
        out = nbp.prefix_encoder(**bad, validate=validate)
        lazy.finish_all()
        assert np.isfinite(out.array).all()
    elsewhere = threading.Thread(target=lambda: nbp.prefix_encoder(**good))
    elsewhere.start()
    elsewhere.join()
    if validate == "full":
        with pytest.raises(ValueError, match=naming(*BAD_BLOCK, "earlier call")):
            nbp.prefix_encoder(**good)
    out = nbp.prefix_encoder(**good)
    lazy.finish_all()
    assert_close(out.array, case)


def test_calls_do_not_pile_up(lazy: FakeDriver) -> None:
    """What a thread's calls leave behind is bounded, on a GPU that never catches up by itself."""
    given = on_gpu(lazy, make_case([1], [3], dtype="float16"))
    for _ in range(target.MAX_PENDING + 20):
        nbp.prefix_encoder(**given)
    assert len(target._pending.calls) <= target.MAX_PENDING + 1
    assert len(lazy._host_pages) == 1


def test_unread_blocks_do_not_matter(fake: FakeDriver) -> None:
    """Those behind the last key, and those of blocks that are not held."""
    case = case_of(lengths=SHORT)
    held = np.ones(case.block_tables.shape, bool)
    held[2, 1] = False
    out = nbp.prefix_encoder(**on_gpu(fake, spoilt(case)), held_blocks=held, validate="wait")
    expected = run(case, "reference", held_blocks=held)
    np.testing.assert_allclose(out.array.astype(float), expected.astype(float), atol=2e-3)


@pytest.mark.parametrize("form", ["causal", "alibi_left_align-generator", "alibi-template"])
def test_parts(fake: FakeDriver, form: str) -> None:
    """float32 outputs of held keys, with an lse that lacks the part's shift; slopes on either
    side."""
    case = with_mask(case_of(lengths=SHORT), form)
    held = np.random.default_rng(0).random(case.block_tables.shape) < 0.5
    a = case.arguments()
    options = {name: a.pop(name) for name in ("mask_type", "mask", "slopes", "qk_scale")}
    want = plan_partial(*a.values(), held, Context("reference"), **options)
    want.run()
    there = {name: DeviceArray(fake, value) for name, value in options.items() if isinstance(value, np.ndarray)}
    given = on_gpu(fake, case)
    op = plan_partial(*(given[name] for name in a), held, Context(), **options | there)
    op.run()
    assert op.out.dtype == np.float32
    np.testing.assert_allclose(op.out.array, want.out, atol=2e-5)
    np.testing.assert_allclose(op.lse.array, want.lse, atol=2e-4)
    assert (op.part_shift is None) == (want.part_shift is None)
    if op.part_shift is not None:
        np.testing.assert_array_equal(op.part_shift, want.part_shift)


def test_lengths_belong_on_the_host(fake: FakeDriver) -> None:
    case = case_of(lengths=SHORT)
    for name in ("seq_len", "kv_seq_len"):
        lengths = DeviceArray(fake, np.array(getattr(case, name), np.int32))
        with pytest.raises(TypeError, match=naming(name, "cuda:0", "host-side")):
            nbp.prefix_encoder(**on_gpu(fake, case) | {name: lengths})
