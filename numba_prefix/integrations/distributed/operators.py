"""The operator over the ranks of a torch.distributed group, which share out the heads (tensor
parallel) or the blocks of the keys (context parallel).

Each function is a collective: every rank of the group calls it, in the same order. An error on one
rank is raised on all of them (RankError on the others); only a rank that is interrupted or dies
leaves the rest to the group's timeout. Tensors are exchanged on the device that they are on,
whatever the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from numba_prefix.front.encoder import check_flag, plan_partial, prefix_encoder
from numba_prefix.front.operation import Context, Op
from numba_prefix.inputs.arrays import describe
from numba_prefix.inputs.lengths import check_held_blocks, check_lengths
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.inputs.problem import as_int, static_problem
from numba_prefix.integrations.distributed.ranks import CALLS, RankError, Ranks, check_equal, facts_of
from numba_prefix.rules.elementwise import F32_ONE
from numba_prefix.rules.softmax import LOG2_E, exp_score, log_sum_exp, normalize, part_of_output, shift_of

__all__ = ["RankError", "context_parallel_prefix_encoder", "head_parallel_prefix_encoder", "head_share"]

_COMMON = ("return_lse", "dtype", "num_tokens", "batch", "head_size", "mask_type", "qk_scale", "seq_len, kv_seq_len")


def head_share(num_heads: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and one past the last of num_heads kv heads that fall to a rank: shares differ by one
    head at most.

    Query heads follow their kv head: times head_num // kv_head_num. Raises TypeError, and
    ValueError where a rank would have none.
    """
    num_heads, rank = as_int(num_heads, "num_heads"), as_int(rank, "rank")
    world_size = as_int(world_size, "world_size")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: got {rank}, expected 0 to {world_size - 1}")
    if num_heads < world_size:
        raise ValueError(f"num_heads: got {num_heads}, expected at least one for each of {world_size} ranks")
    return num_heads * rank // world_size, num_heads * (rank + 1) // world_size


def head_parallel_prefix_encoder(
    query: Any,
    key: Any,
    value: Any,
    block_tables: Any,
    seq_len: Any,
    kv_seq_len: Any,
    *,
    group: Any = None,
    mask_type: Any = "causal",
    mask: Any = None,
    slopes: Any = None,
    head_num: int | None = None,
    kv_head_num: int | None = None,
    qk_scale: float = 1.0,
    gather: bool = False,
    return_lse: bool = False,
    target: str = "auto",
    num_threads: int | None = None,
) -> Any:
    """prefix_encoder where each rank has some of the heads. Ranks may give equal numbers in
    different forms. The arguments that differ from its own:

    query         torch tensor, this rank's query heads; ranks hold consecutive heads, in rank order
    key, value    this rank's kv heads; shares may differ in size (head_share), not in query heads
                  per kv head
    head_num      number of this rank's query heads; kv_head_num likewise
    slopes        float32 for the query heads of all ranks, in order
    mask          None, the template [256, 256], or [heads of all ranks, mask_len, 128]
    group         a torch.distributed group; None: the default one
    gather        return the heads of all ranks on each of them, not this rank's own

    Heads are independent, so no rank needs another's results: without `gather` only sizes are
    exchanged. Returns out, or (out, lse), bit for bit equal to one process's result for those
    heads. A kv head may be on several ranks, each with some of its query heads: then the result is
    that of one process with a copy of it for each rank, which rounds otherwise. Raises the errors
    of prefix_encoder, ValueError for arguments that differ between ranks, RankError for an error of
    another rank.
    """
    ranks = Ranks(group)

    def describe_share() -> tuple[None, dict[str, int]]:
        _check_tensor(query)
        check_flag("gather", gather)
        check_flag("return_lse", return_lse)
        shapes, _ = static_problem(
            query, key, value, block_tables, head_num=head_num, kv_head_num=kv_head_num, qk_scale=qk_scale
        )
        kind = MaskType.parse(mask_type)
        lengths = check_lengths(shapes, seq_len, kv_seq_len)
        flags = {
            "call": CALLS.index("head_parallel_prefix_encoder"),
            "return_lse": bool(return_lse),
            "gather": bool(gather),
        }
        return None, facts_of(replace(shapes, mask_type=kind), lengths, mask, slopes, **flags)

    _, facts = ranks.agree(describe_share)
    check_equal(facts, ("call", "gather", *_COMMON, "group_size", "mask", "slopes"))
    shares = [given["head_num"] for given in facts]

    def attend() -> tuple[Any, dict[str, int]]:
        begin = sum(shares[: ranks.rank])
        mine = slice(begin, begin + shares[ranks.rank])
        out, lse = prefix_encoder(
            query, key, value, block_tables, seq_len, kv_seq_len,
            mask_type=mask_type, mask=_mask_of_heads(mask, sum(shares), mine),
            slopes=_slopes_of_heads(slopes, sum(shares), mine), head_num=head_num, kv_head_num=kv_head_num,
            qk_scale=qk_scale, return_lse=True, target=target, num_threads=num_threads,
        )  # fmt: skip
        return (out, lse), {}

    (out, lse), _ = ranks.agree(attend)
    if gather:
        widths = shares if out.ndim == 3 else [share * facts[0]["head_size"] for share in shares]
        out = ranks.concatenate(out, widths)
        lse = ranks.concatenate(lse, shares) if return_lse else None
    return (out, lse) if return_lse else out


def context_parallel_prefix_encoder(
    query: Any,
    key: Any,
    value: Any,
    block_tables: Any,
    held_blocks: Any,
    seq_len: Any,
    kv_seq_len: Any,
    *,
    group: Any = None,
    mask_type: Any = "causal",
    mask: Any = None,
    slopes: Any = None,
    head_num: int | None = None,
    kv_head_num: int | None = None,
    qk_scale: float = 1.0,
    return_lse: bool = False,
    target: str = "auto",
    num_threads: int | None = None,
) -> Any:
    """prefix_encoder where each rank has some of the blocks, and all have the same queries.
    Arguments are the same on every rank; those that differ from prefix_encoder's:

    query         torch tensor
    key, value    this rank's own blocks, of one block_size on all ranks; a rank may have none
    block_tables  [batch, max_block_num]: this rank's physical block of each logical block
    held_blocks   bool [batch, max_block_num], on the host: the logical blocks that this rank has;
                  table entries of others may hold anything. Exactly one rank holds each block below
                  kv_seq_len
    group         a torch.distributed group; None: the default one

    Each rank attends to its own keys at their true positions; the outputs, in float32 with their
    log-sum-exps, are summed over the ranks. Returns out, or (out, lse), the same bits on every
    rank, equal to one process's result within the operator's tolerance. Raises the errors of
    prefix_encoder, ValueError for arguments that differ between ranks and for blocks that not
    exactly one rank holds, RankError for an error of another rank.
    """
    ranks = Ranks(group)
    options = {"mask_type": mask_type, "mask": mask, "slopes": slopes, "qk_scale": qk_scale}
    options |= {"head_num": head_num, "kv_head_num": kv_head_num}

    def attend() -> tuple[tuple[Op, Any], dict[str, int]]:
        _check_tensor(query)
        check_flag("return_lse", return_lse)
        if held_blocks is None:
            raise TypeError("held_blocks: got None, expected a bool array [batch, max_block_num]")
        arrays = (query, key, value, block_tables, seq_len, kv_seq_len)
        op = plan_partial(*arrays, held_blocks, Context(target, num_threads), **options)
        lengths = check_lengths(op.problem, seq_len, kv_seq_len)
        flags = {"call": CALLS.index("context_parallel_prefix_encoder"), "return_lse": bool(return_lse)}
        facts = facts_of(op.problem, lengths, mask, slopes, **flags)
        op.run()
        return (op, lengths), facts

    (op, lengths), facts = ranks.agree(attend)
    same = ("call", *_COMMON, "head_num", "kv_head_num", "block_size", "mask", "slopes")
    check_equal(facts, same)
    _check_holders(ranks, check_held_blocks(op.problem, held_blocks), lengths, op.problem.block_size)
    heads = (op.problem.num_tokens, op.problem.head_num, op.problem.head_size)
    out, lse = merge_parts(ranks, op.out.reshape(heads), op.lse)
    if return_lse and (shift := op.part_shift) is not None:
        lse = lse + torch.from_numpy(shift).to(lse.device)
    out = out.to(query.dtype).reshape(query.shape)
    return (out, lse) if return_lse else out


def merge_parts(ranks: Ranks, out: Any, lse: Any) -> tuple[Any, Any]:
    """Attention over the keys of all ranks, from each rank's result over its own keys.

    out: float32 [num_tokens, head_num, head_size]. lse: float32 [num_tokens, head_num]. Returns
    both, the same on every rank.
    """
    shift = shift_of(ranks.largest(lse.clone()))
    alpha = exp_score(lse, shift, LOG2_E)[..., None]
    total = ranks.sum(torch.cat([part_of_output(out, lse[..., None], alpha), alpha], -1))
    acc, l_i = total[..., :-1], total[..., -1:]
    return normalize(acc, l_i), log_sum_exp(shift, l_i[..., 0], F32_ONE)


def _check_tensor(query: Any) -> None:
    if not isinstance(query, torch.Tensor):
        raise TypeError(f"query: got {type(query).__name__}, expected a torch tensor")


def _check_holders(ranks: Ranks, held: Any, lengths: tuple[Any, Any], block_size: int) -> None:
    """Raise ValueError, on every rank, for the first block below kv_seq_len that not exactly one
    rank holds."""
    q_len, kv_len = lengths
    num_blocks = np.where(q_len > 0, -(-kv_len // block_size), 0)
    width = int(num_blocks.max(initial=0))
    holders = ranks.sum(torch.from_numpy(held[:, :width].astype(np.int32)).to(ranks.device)).cpu().numpy()
    is_wrong = (holders != 1) & (np.arange(width) < num_blocks[:, None])
    if is_wrong.any():
        sequence, block = divmod(int(is_wrong.argmax()), width)
        got = f"block {block} of sequence {sequence} on {holders[sequence, block]} ranks"
        raise ValueError(f"held_blocks: got {got}, expected each block of a sequence on exactly one rank")


def _mask_of_heads(mask: Any, num_heads: int, mine: slice) -> Any:
    """The slice of a mask for all heads that a rank's heads use; other forms unchanged."""
    if mask is None or describe(mask, "mask").ndim != 3:
        return mask
    _check_heads(describe(mask, "mask").shape, "mask", num_heads)
    return mask[mine]


def _slopes_of_heads(slopes: Any, num_heads: int, mine: slice) -> Any:
    if slopes is None:
        return None
    shape: Sequence[int] = (len(slopes),) if isinstance(slopes, (list, tuple)) else describe(slopes, "slopes").shape
    _check_heads(shape, "slopes", num_heads)
    return slopes[mine]


def _check_heads(shape: Sequence[int], name: str, num_heads: int) -> None:
    if len(shape) == 0 or shape[0] != num_heads:
        raise ValueError(f"{name}: got shape {tuple(shape)}, expected {num_heads} heads first: those of all ranks")
