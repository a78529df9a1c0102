"""Run a target on arrays that end, and then begin, at memory without access; inputs cannot be
written either.

guard_pages.py TARGET [DTYPE KIND]: KIND is decode, prefill or strided; without, some of everything.
guard_pages.py TARGET --minutes N: random problems for so long.
guard_pages.py others DTYPE…: reshape_and_cache and merge_states.

The last line printed is the running case, which helps to explain a SIGSEGV.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
from cases import DTYPES, MASK_FORMS, Case, make_case, run, same_bits, with_mask
from fences import fence, fenced, fenced_bytes

import numba_prefix as nbp
from numba_prefix.front import paged
from numba_prefix.planning import target as planning_target

HEAD_SIZES = (1, 16, 72, 128, 256)
# Query and key lengths: single tokens, some over blocks that are exactly full, one long enough to
# be split; and chunks.
LENGTHS = {"decode": ([1, 1, 1, 1], [1, 32, 77, 2560]), "prefill": ([7, 33, 64, 0], [7, 65, 320, 9])}


def both_phases(case: Case, out: np.ndarray, is_at_end: bool) -> None:
    """Run ATB's two phases in a workspace of exactly the size reported."""
    heads, kv_heads = case.query.shape[1], case.key.shape[2]
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        *(case.query, case.key, case.value, case.block_tables, case.mask, case.seq_len, case.kv_seq_len, case.slopes),
        *(case.mask_type, heads, kv_heads, case.qk_scale, out, nbp.Context("cpu", 2)),
    )
    workspace, _ = fenced_bytes(size, is_at_end)
    workspace[...] = 0xFF
    nbp.self_attention_prefix_encoder(workspace, size, op)


def fenced_like(is_at_end: bool) -> Any:
    """Replacement of the package's allocation of outputs: beside a fence and filled with NaN."""

    def empty_like(_: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return fenced(np.full(shape, np.nan, DTYPES[dtype]), is_at_end)

    return empty_like


def check(case: Case, target: str, *, what: str = "") -> None:
    print(
        what,
        case.query.shape,
        case.key.shape,
        case.query.dtype,
        case.mask_type,
        case.seq_len,
        case.kv_seq_len,
        flush=True,
    )
    expected, expected_lse = run(case, target, return_lse=True)
    for is_at_end in (True, False):
        inside = fence(case, is_at_end)
        out = fenced(np.full(case.query.shape, np.nan, case.query.dtype), is_at_end)
        with mock.patch.object(planning_target, "empty_like", fenced_like(is_at_end)):
            _, lse = run(inside, target, return_lse=True, out=out)
        same_bits(out, expected)
        same_bits(lse, expected_lse)
        out = fenced(np.full(case.query.shape, np.nan, case.query.dtype), is_at_end)
        if target == "cpu":
            both_phases(inside, out, is_at_end)
            same_bits(out, expected)


def quick(target: str) -> None:
    """Run at_random for a few seconds, and the cases that its problems do not cover."""
    at_random(target, 2.0)
    strided(target, "float16", head_sizes=(16,))


def others(dtype_names: Sequence[str] = tuple(DTYPES)) -> None:
    """Run reshape_and_cache and merge_states: every array beside a fence, inputs in pages that
    cannot be written."""
    rng = np.random.default_rng(0)
    for dtype, is_at_end in itertools.product(dtype_names, (True, False)):
        to = DTYPES[dtype]
        new = [rng.standard_normal((7, 3, 33)).astype(to) for _ in range(2)]
        caches = [fenced(np.zeros((3, 5, 3, 33), to), is_at_end) for _ in range(2)]
        slots = fenced(np.array([0, 14, -1, 3, 7, 14, 8], np.int32), is_at_end, is_read_only=True)
        nbp.reshape_and_cache(*(fenced(x, is_at_end, is_read_only=True) for x in new), *caches, slots)
        for rows, cache in zip(new, caches, strict=True):
            expected = np.zeros_like(cache).reshape(15, 3, 33)
            for token in (0, 3, 4, 5, 6):
                expected[slots[token]] = rows[token]
            same_bits(cache.reshape(15, 3, 33), expected)
        outs = [rng.standard_normal((5, 4, 17)).astype(to) for _ in range(2)]
        sums = [rng.standard_normal((5, 4)).astype(np.float32) for _ in range(2)]
        states = [x for pair in zip(outs, sums, strict=True) for x in pair]
        with mock.patch.object(paged, "empty_like", fenced_like(is_at_end)):
            merged = nbp.merge_states(*(fenced(x, is_at_end, is_read_only=True) for x in states))
        for got, wanted in zip(merged, nbp.merge_states(*states), strict=True):
            same_bits(got, wanted)


def some_of_everything(target: str) -> None:
    for head_size in (1, 3, 16, 17, 33, 80, 256):
        for dtype in DTYPES:
            for form in ("causal", "alibi-template", "alibi_sqrt-heads"):
                for block_size in (1, 5, 16):
                    # Without a spare block and with the last block full, the last key of the cache
                    # ends at the fence.
                    q, kv = [7, 1, 18], [15, 20, 60]
                    options: dict[str, Any] = {"head_num": 6, "kv_head_num": 2, "head_size": head_size, "dtype": dtype}
                    case = make_case(q, kv, block_size=block_size, spare=0, tail=0, **options)
                    check(with_mask(case, form), target)


def every_kind(target: str, dtype: str, kind: str) -> None:
    for index, head_size in enumerate(HEAD_SIZES):
        for block_size in (1, 16, 128):
            q, kv = LENGTHS[kind]
            group = (1, 4, 8)[index % 3]
            options: dict[str, Any] = {"head_num": 2 * group, "kv_head_num": 2, "head_size": head_size, "dtype": dtype}
            case = make_case(q, kv, block_size=block_size, spare=0, tail=0, **options)
            for form in MASK_FORMS if block_size == 16 else MASK_FORMS[:2]:
                check(with_mask(case, form, mask_dtype=dtype if head_size == 16 else "float32"), target, what=kind)


def strided(target: str, dtype: str, head_sizes: Sequence[int] = HEAD_SIZES) -> None:
    """The same elements in rows further apart, heads before tokens, backwards, and with one block
    for all."""
    for head_size in head_sizes:
        case = make_case([5, 1], [21, 32], head_num=4, kv_head_num=2, head_size=head_size, dtype=dtype, spare=0, tail=0)
        expected = run(case, target)
        for is_at_end in (True, False):
            heads_first = {
                name: fenced(getattr(case, name).transpose(0, 2, 1, 3), is_at_end, is_read_only=True).transpose(
                    0, 2, 1, 3
                )
                for name in ("key", "value")
            }
            backwards = {
                name: fenced(getattr(case, name)[::-1, ::-1], is_at_end, is_read_only=True)[::-1, ::-1]
                for name in ("key", "value", "query")
            }
            wide = np.zeros((6, 5, head_size), case.query.dtype)
            mine = slice(1, None) if is_at_end else slice(None, -1)
            wide[:, mine] = case.query
            apart = {"query": fenced(wide, is_at_end, is_read_only=True)[:, mine]}
            columns = np.asfortranarray(case.block_tables).T
            table = {"block_tables": fenced(columns, is_at_end, is_read_only=True).T}
            for changes in (heads_first, backwards, apart, table):
                print("strided", dtype, head_size, is_at_end, *changes, flush=True)
                same_bits(run(case, target, **changes), expected)
        one = fenced(case.key[:1], True, is_read_only=True)
        many = np.broadcast_to(one, (9, *one.shape[1:]))
        print("one page", dtype, head_size, flush=True)
        same_bits(
            run(case, target, key=many, value=many, block_tables=np.full((2, 2), 8, np.int32)),
            run(case, target, key=case.key[:1], value=case.key[:1], block_tables=np.zeros((2, 2), np.int32)),
        )


def at_random(target: str, seconds: float) -> None:
    end, seed = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        rng = random.Random(seed)
        q = [rng.choice([0, 1, 1, rng.randrange(150)]) for _ in range(rng.randrange(1, 5))]
        kv = [n + rng.choice([0, rng.randrange(40), rng.randrange(1, 3000)]) for n in q]
        kv_heads, group = rng.randrange(1, 4), rng.choice([1, 2, 3, 7, 8, 16])
        case = make_case(
            q, kv, head_num=kv_heads * group, kv_head_num=kv_heads, head_size=rng.randrange(1, 257),
            block_size=rng.choice([1, 7, 16, 128, rng.randrange(1, 300)]), dtype=rng.choice(list(DTYPES)), spare=0, tail=0,
            seed=seed,
        )  # fmt: skip
        mask_dtype = rng.choice(["float32", str(case.query.dtype)])
        check(with_mask(case, rng.choice(MASK_FORMS), seed, mask_dtype), target, what=f"seed {seed}")
        seed += 1
    print(f"{seed} problems")


if __name__ == "__main__":
    target, *which = sys.argv[1:]
    if target == "others":
        others(which)
    elif not which:
        some_of_everything(target)
    elif which[0] == "--minutes":
        at_random(target, 60 * float(which[1]))
    elif which[1] == "strided":
        strided(target, which[0])
    else:
        every_kind(target, *which)
