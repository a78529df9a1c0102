"""group_member.py RANK SIZE FILE [WORDS]: one rank of a gloo group. Every rank makes the same
problems and keeps its share of them. WORDS: only scenarios whose names have them.

Prints a JSON object: the outcome of each scenario, "right" or a traceback.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import INT_MAX, MASK_FORMS, Case, assert_close, make_case, run, same_bits, with_mask

import numba_prefix as nbp
from numba_prefix.front.operation import Op
from numba_prefix.integrations.distributed.operators import (
    RankError,
    context_parallel_prefix_encoder,
    head_parallel_prefix_encoder,
    head_share,
)

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])
# Decode and prefill rows, an empty sequence, one whose keys are split; sequence 1 will be wholly on
# one rank.
Q_LEN, KV_LEN = [1, 5, 0, 1, 40], [70, 120, 9, 2500, 170]


def tensor(array: np.ndarray) -> Any:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def is_same_everywhere(*tensors: Any) -> bool:
    digest = hashlib.blake2b(digest_size=8)
    for t in tensors:
        digest.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    mine = torch.tensor([int.from_bytes(digest.digest(), "little", signed=True)])
    digests = [torch.zeros_like(mine) for _ in range(SIZE)]
    dist.all_gather(digests, mine)
    return len({int(d) for d in digests}) == 1


# --- heads


def heads_case(form: str = "causal", dtype: str = "float32") -> Case:
    """One kv head more than ranks, two query heads for each; slopes in random order."""
    kv_heads = SIZE + 1
    case = make_case([1, 30, 0], [3000, 150, 4], head_num=2 * kv_heads, kv_head_num=kv_heads, dtype=dtype)
    return with_mask(case, form, mask_dtype=dtype)


def heads_call(case: Case, **changes: Any) -> Any:
    """The arguments of this rank's share of the case; slopes and mask whole."""
    begin, end = head_share(case.key.shape[2], RANK, SIZE)
    arguments = {
        "query": tensor(case.query[:, 2 * begin : 2 * end]),
        "key": tensor(case.key[:, :, begin:end]),
        "value": tensor(case.value[:, :, begin:end]),
    }
    return head_parallel_prefix_encoder(**(case.arguments() | arguments | changes))


def heads(form: str, dtype: str) -> None:
    """Compare, bit for bit, with the heads of one process's result: this rank's own, and
    gathered."""
    case = heads_case(form, dtype)
    begin, end = head_share(case.key.shape[2], RANK, SIZE)
    own, own_lse = heads_call(case, return_lse=True)
    every, every_lse = heads_call(case, return_lse=True, gather=True)
    flat = heads_call(
        case,
        query=tensor(case.query[:, 2 * begin : 2 * end].reshape(len(case.query), -1)),
        head_num=2 * (end - begin),
        gather=True,
    )
    out, lse = run(case, "cpu", return_lse=True)
    same_bits(own, out[:, 2 * begin : 2 * end])
    same_bits(own_lse, lse[:, 2 * begin : 2 * end])
    same_bits(every, out)
    same_bits(every_lse, lse)
    same_bits(flat, out.reshape(len(out), -1))


def heads_with_listed_slopes() -> None:
    """Share out slopes given as a list of numbers, in random order, as an array's are."""
    case = replace(heads_case(), mask_type="alibi")
    slopes = [((7 * h) % 5 + 1) / 16 for h in range(case.query.shape[1])]
    same_bits(heads_call(case, slopes=slopes, gather=True), run(case, "cpu", slopes=slopes))


def heads_replicated() -> None:
    """N08: with fewer kv heads than ranks several ranks hold the same one, each for its own query
    heads. The bits are those of one process that has a copy of it for each rank."""
    total, kv_heads = 2 * SIZE, SIZE // 2 if SIZE % 2 == 0 else 1
    held = [rank * kv_heads // SIZE for rank in range(SIZE)]
    for form, dtype in (("causal", "bfloat16"), ("alibi-generator", "float16"), ("alibi_sqrt-template", "float32")):
        case = make_case(
            [3, 20], [9, 40], head_num=total, kv_head_num=kv_heads, head_size=16, block_size=8, dtype=dtype
        )
        case = with_mask(case, form, mask_dtype=dtype)
        arguments = {
            "query": tensor(case.query[:, 2 * RANK : 2 * RANK + 2]),
            "key": tensor(case.key[:, :, held[RANK] : held[RANK] + 1]),
            "value": tensor(case.value[:, :, held[RANK] : held[RANK] + 1]),
        }
        out, lse = head_parallel_prefix_encoder(**(case.arguments() | arguments), gather=True, return_lse=True)
        assert_close(out, case, lse)
        copies = replace(case, key=case.key[:, :, held], value=case.value[:, :, held])
        same_bits(out, run(copies, "cpu"))
    with raises(ValueError, f"num_heads: got {SIZE - 1}, expected at least one for each of {SIZE} ranks"):
        head_share(SIZE - 1, RANK, SIZE)


LENGTHS = (
    list,
    lambda x: torch.tensor(x, dtype=torch.int32),
    lambda x: np.array(x, np.int64),
    lambda x: np.array(x, np.uint16),
    tuple,
)


def spelled(turn: int, case: Case, slopes: list[float] | None) -> dict[str, Any]:
    """The same values, in another form on each rank."""
    kinds = ("alibi", nbp.MaskType.ALIBI_COMPRESS, int(nbp.MaskType.ALIBI_COMPRESS), "ALIBI_COMPRESS")
    q_form, kv_form = LENGTHS[(turn + RANK) % len(LENGTHS)], LENGTHS[(turn + 2 * RANK) % len(LENGTHS)]
    given = {"seq_len": q_form(list(case.seq_len)), "kv_seq_len": kv_form(list(case.kv_seq_len))}
    given |= {"mask_type": kinds[(turn + RANK) % 4], "qk_scale": (0.25, np.float32(0.25))[(turn + RANK) % 2]}
    forms = (list, lambda x: np.array(x, np.float32), lambda x: torch.tensor(x, dtype=torch.float32), tuple)
    return given | {"slopes": None if slopes is None else forms[(turn + RANK) % 4](slopes)}


def equal_values_are_equal() -> None:
    """N08: lists, tensors and arrays of any integer type, names and numbers of a kind, a template
    in either dtype: what ranks have to agree on is what they mean."""
    case = replace(heads_case(dtype="bfloat16"), mask_type="alibi")
    slopes = [((7 * h) % 5) / 16 for h in range(case.query.shape[1])]
    slopes[0] = -0.0 if RANK else 0.0
    expected = run(case, "cpu", slopes=np.abs(np.array(slopes, np.float32)))
    for turn in range(5):
        same_bits(heads_call(case, **spelled(turn, case, slopes), gather=True), expected)
    negative = [-abs(s) for s in slopes]
    template = tensor(np.asarray(nbp.alibi_mask("alibi", "float32")))
    masks = (template.bfloat16(), template, template.T.contiguous().T)
    expected = run(replace(case, mask=template.numpy()), "cpu", slopes=np.array(negative, np.float32))
    for turn in range(3):
        options = spelled(turn, case, negative) | {"mask": masks[(turn + RANK) % 3]}
        same_bits(heads_call(case, **options, gather=True), expected)
    pages = pages_case(dtype="bfloat16")
    out = pages_call(pages, **spelled(0, pages, slopes[:4]))
    same_bits(out, pages_call(pages, mask_type="alibi", slopes=slopes[:4]))


def values_that_differ() -> None:
    """Other numbers in the same form, or one other number in another form, on one rank."""
    case = replace(heads_case(), mask_type="alibi")
    slopes = [((7 * h) % 5 + 1) / 16 for h in range(case.query.shape[1])]
    other = [*slopes[:-1], slopes[-1] + 2.0**-10]
    for form in (list, np.float32, torch.tensor):
        with raises(ValueError, "slopes: got others on rank 1"):
            heads_call(case, slopes=form(other) if RANK == 1 else slopes)
    template = np.asarray(nbp.alibi_mask("alibi", "float32"))
    changed = template.copy()
    changed[255, 0] += 1
    with raises(ValueError, "mask: got others on rank 1"):
        heads_call(case, slopes=slopes, mask=changed if RANK == 1 else template)


# --- pages


def owners_of(case: Case, pattern: str) -> np.ndarray:
    """The rank that holds each logical block, [batch, max_block_num]."""
    shape = case.block_tables.shape
    if pattern == "striped":
        owner = np.broadcast_to(np.arange(shape[1]) % SIZE, shape).copy()
    else:  # the last rank has nothing
        owner = np.random.default_rng(3).integers(0, SIZE - 1, shape)
    if len(shape) and shape[0] > 1:
        owner[1] = 0
    return owner


def local_pages(case: Case, held: np.ndarray) -> dict[str, Any]:
    """A cache of the held blocks only, in an order of this rank's own, and a table with junk for
    all others."""
    needed = np.arange(held.shape[1]) * case.key.shape[1] < np.array(case.kv_seq_len)[:, None]
    sequence, block = np.nonzero(held & needed)
    places = np.random.default_rng(RANK).permutation(len(sequence))
    tables = np.where(np.indices(held.shape).sum(axis=0) % 2, -1, INT_MAX).astype(np.int32)
    tables[sequence, block] = places
    pages = case.block_tables[sequence, block][np.argsort(places)]
    return {"key": tensor(case.key[pages]), "value": tensor(case.value[pages]), "block_tables": tensor(tables)}


def pages_call(case: Case, pattern: str = "striped", **changes: Any) -> Any:
    held = owners_of(case, pattern) == RANK
    arguments = {"query": tensor(case.query), "held_blocks": held} | local_pages(case, held)
    return context_parallel_prefix_encoder(**(case.arguments() | arguments | changes))


def pages_case(form: str = "causal", dtype: str = "float32", block_size: int = 16) -> Case:
    case = make_case(Q_LEN, KV_LEN, head_num=4, kv_head_num=2, block_size=block_size, dtype=dtype)
    return with_mask(case, form, mask_dtype=dtype)


def pages(form: str, dtype: str, pattern: str, block_size: int) -> None:
    """Compare with the result of one process, within the tolerance, and the ranks bit for bit."""
    case = pages_case(form, dtype, block_size)
    out, lse = pages_call(case, pattern, return_lse=True)
    assert is_same_everywhere(out, lse)
    assert out.dtype == tensor(case.query).dtype
    assert lse.dtype == torch.float32
    if RANK == 0:
        assert_close(out, case, lse)


def pages_flat_query() -> None:
    """A query with its heads joined gives an output like it."""
    case = pages_case()
    flat = pages_call(case, query=tensor(case.query.reshape(len(case.query), -1)), head_num=4)
    assert flat.shape == (len(case.query), case.query.shape[1] * case.query.shape[2])
    assert torch.equal(flat.reshape(case.query.shape), pages_call(case))


def pages_rows_that_see_nothing() -> None:
    """Rows that see no key, by a mask of -inf in one head: out 0 and lse -inf, as with one
    process."""
    case = pages_case("alibi-heads")
    case.mask[1] = -np.inf
    out, lse = pages_call(case, return_lse=True)
    assert (out[:, 1] == 0).all()
    assert torch.isneginf(lse[:, 1]).all()
    assert_close(out, case, lse)


def pages_with_nan() -> None:
    """A NaN key, which reaches the rows that see it, whichever rank holds it, and no other."""
    case = make_case([20], [100], head_num=2, block_size=16)
    page = case.block_tables[0, 90 // 16]
    case.key[page, 90 % 16] = np.nan
    out = pages_call(case)
    assert torch.isnan(out[10:]).all()
    assert torch.isfinite(out[:10]).all()


def empty_calls() -> None:
    """Calls without tokens or sequences: empty outputs."""
    case = make_case([0, 0], [5, 0], head_num=2 * (SIZE + 1), kv_head_num=SIZE + 1)
    out, lse = heads_call(case, return_lse=True, gather=True)
    assert out.shape == case.query.shape and lse.shape == (0, case.query.shape[1])
    assert pages_call(case).shape == case.query.shape


def part_of_the_ranks() -> None:
    """A group of the first and the last rank; a rank outside gets an error."""
    group = dist.new_group([0, SIZE - 1])
    if RANK not in (0, SIZE - 1):
        with raises(ValueError, "group: got one without this process"):
            pages_call(pages_case(), group=group)
        return
    case = pages_case()
    held = (owners_of(case, "striped") % 2 == 0) == (RANK == 0)
    out = context_parallel_prefix_encoder(
        **(
            case.arguments()
            | {"query": tensor(case.query), "held_blocks": held, "group": group}
            | local_pages(case, held)
        )
    )
    assert_close(out, case)


# --- errors


def raises(error: type[Exception], words: str) -> Any:
    return pytest.raises(error, match=re.escape(words))


def fails_on_rank_1(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    """Assert the error on rank 1, and RankError with its text elsewhere."""
    with raises(error, words) if RANK == 1 else raises(RankError, f"rank 1: {error.__name__}: {words}"):
        call()


def error_of_a_bad_block() -> None:
    case = pages_case()
    held = owners_of(case, "striped") == RANK
    local = local_pages(case, held)
    if RANK == 1:
        local["block_tables"][0, 1] = 10_000
        assert held[0, 1]
    fails_on_rank_1(ValueError, "block_tables: got block 10000", lambda: pages_call(case, **local))


def error_of_a_kind_of_array() -> None:
    case = pages_case()
    query = case.query if RANK == 1 else tensor(case.query)
    fails_on_rank_1(TypeError, "query: got ndarray", lambda: pages_call(case, query=query))
    case = heads_case()
    slopes = object() if RANK == 1 else None
    fails_on_rank_1(TypeError, "slopes: got object", lambda: heads_call(case, slopes=slopes))
    query = {"query": tensor(case.query[:, :0])} if RANK == 1 else {}
    fails_on_rank_1(ValueError, "query: got shape", lambda: heads_call(case, **query))


def error_while_computing() -> None:
    """An error found while computing, not by validation."""
    run_of_op = Op.run

    def run_out_of_memory(self: Op, workspace: Any = None) -> None:
        raise MemoryError("no room")

    if RANK == 1:
        Op.run = run_out_of_memory  # type: ignore[method-assign]
    try:
        fails_on_rank_1(MemoryError, "no room", lambda: pages_call(pages_case()))
    finally:
        Op.run = run_of_op  # type: ignore[method-assign]


def error_of_holders() -> None:
    """A block on two ranks, a block on none, and no blocks named."""
    case = pages_case()
    held = owners_of(case, "striped") == RANK
    for given, ranks in ((True, 2), (False, 0)):
        other = held.copy()
        if (1 if given else 0) == RANK:
            other[3, 0] = given  # which rank 0 holds
        with raises(ValueError, f"held_blocks: got block 0 of sequence 3 on {ranks} ranks"):
            pages_call(case, held_blocks=other, **local_pages(case, other))
    fails_on_rank_1(
        TypeError, "held_blocks: got None", lambda: pages_call(case, **({"held_blocks": None} if RANK == 1 else {}))
    )


def error_of_arguments_that_differ() -> None:
    """Arguments that differ between ranks: the same message on every rank."""
    case, heads_of = pages_case("alibi-generator"), heads_case("alibi-generator")
    short = make_case([1, 4, 0, 1, 41], KV_LEN, head_num=4, kv_head_num=2)
    for call, changes, words in (
        (pages_call, {"qk_scale": 0.5}, "qk_scale: got 0.5 on rank 1, expected 0.25 as on rank 0"),
        (pages_call, {"mask_type": "alibi_sqrt"}, "mask_type: got ALIBI_COMPRESS_SQRT on rank 1"),
        (pages_call, {"seq_len": short.seq_len}, "seq_len, kv_seq_len: got others on rank 1"),
        (pages_call, {"slopes": case.slopes + 1}, "slopes: got others on rank 1"),
        (pages_call, {"return_lse": True}, "return_lse: got 1 on rank 1, expected 0"),
        (heads_call, {"slopes": heads_of.slopes + 1}, "slopes: got others on rank 1"),
        (heads_call, {"gather": True}, "gather: got 1 on rank 1, expected 0"),
        (heads_call, {"query": tensor(heads_of.query[:, :2])}, "group_size: got 1 on rank 1, expected 2"),
    ):
        what = case if call is pages_call else heads_of
        if "query" in changes and RANK == 1:
            begin, end = head_share(what.key.shape[2], RANK, SIZE)
            changes["query"] = tensor(what.query[:, begin:end])
        with raises(ValueError, words):
            call(what, **(changes if RANK == 1 else {}))
    with raises(ValueError, "call: got head_parallel_prefix_encoder on rank 1, expected context_parallel"):
        (heads_call(heads_of) if RANK == 1 else pages_call(case))


def error_of_heads_in_total() -> None:
    """Slopes or a mask for this rank's heads instead of all."""
    case = heads_case("alibi-generator")
    total = case.query.shape[1]
    with raises(ValueError, f"slopes: got shape (2,), expected {total} heads first"):
        heads_call(case, slopes=case.slopes[:2])
    mask = np.zeros((2, 3000, 128), np.float32)
    with raises(ValueError, f"mask: got shape (2, 3000, 128), expected {total} heads first"):
        heads_call(case, slopes=None, mask=mask)


FORMS_OF_HEADS = [
    ("causal", "float16"),
    ("none", "float32"),
    ("alibi-generator", "float32"),
    ("alibi_sqrt-template", "bfloat16"),
    ("alibi_left_align-heads", "float16"),
]
DTYPES_IN_TURN = ("float32", "float16", "bfloat16")


def scenarios() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for form, dtype in FORMS_OF_HEADS:
        found[f"heads {form}"] = lambda a=(form, dtype): heads(*a)
    for i, form in enumerate(MASK_FORMS):
        arguments = (form, DTYPES_IN_TURN[i % 3], ("striped", "some")[i % 2], (16, 3, 128)[i % 3])
        found[f"pages {form}"] = lambda a=arguments: pages(*a)
    for scenario in (
        heads_with_listed_slopes, heads_replicated, equal_values_are_equal, values_that_differ, pages_flat_query, pages_rows_that_see_nothing, pages_with_nan, empty_calls,
        part_of_the_ranks, error_of_a_bad_block, error_of_a_kind_of_array, error_while_computing, error_of_holders,
        error_of_arguments_that_differ, error_of_heads_in_total,
    ):  # fmt: skip
        found[scenario.__name__.replace("_", " ")] = scenario
    found["a right result after all errors"] = lambda: pages("causal", "float32", "striped", 16)
    return found


def main() -> None:
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=SIZE, timeout=timeout)
    outcomes = {}
    chosen = {name: scenario for name, scenario in scenarios().items() if " ".join(sys.argv[4:]) in name}
    for name, scenario in chosen.items():
        try:
            scenario()
            outcomes[name] = "right"
        except Exception:
            outcomes[name] = traceback.format_exc()
        dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
