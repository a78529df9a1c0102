"""The one door: validate, choose a target, plan, run; in one call or in ATB's two phases."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.front.operation import TARGETS, VALIDATE, Context, Op, check_choice, check_stream
from numba_prefix.inputs.lengths import check_held_blocks, check_lengths
from numba_prefix.inputs.problem import static_problem
from numba_prefix.runtime import num_threads as threads

__all__ = [
    "TARGETS",
    "Context",
    "Op",
    "check_flag",
    "plan_partial",
    "prefix_encoder",
    "self_attention_prefix_encoder",
    "self_attention_prefix_encoder_get_workspace_size",
]


def prefix_encoder(
    query: Any,
    key: Any,
    value: Any,
    block_tables: Any,
    seq_len: Any,
    kv_seq_len: Any,
    *,
    mask_type: Any = "causal",
    mask: Any = None,
    slopes: Any = None,
    head_num: int | None = None,
    kv_head_num: int | None = None,
    qk_scale: float = 1.0,
    out: Any = None,
    return_lse: bool = False,
    target: str = "auto",
    num_threads: int | None = None,
    workspace: Any = None,
    stream: Any = None,
    validate: str = "full",
    held_blocks: Any = None,
) -> Any:
    """Attention of packed variable-length queries over a paged KV cache; ATB's SelfAttention
    PrefixEncoder.

    query         float16, bfloat16 or float32 [num_tokens, head_num, head_size] or [num_tokens, head_num * head_size]
    key, value    as query, [num_blocks, block_size, kv_head_num, head_size] (or the last two joined): the paged cache
    block_tables  int32 [batch, max_block_num]: physical blocks of each sequence, in order
    seq_len       query tokens of each sequence, [batch], on the host; the last of its kv_seq_len tokens
    kv_seq_len    total key tokens of each sequence, [batch], on the host
    mask_type     MaskType, number or name: "causal", "none", "alibi", "alibi_sqrt", "alibi_left_align", …
    mask          None, or ATB's ALiBi template [256, 256] or [head_num, mask_len, 128], query's dtype or float32
    slopes        float32 [head_num], for the ALiBi kinds, in any memory: the paper's positive slopes when mask is None
    head_num      may be left out when query is 3-D
    kv_head_num   0: head_num; None: the cache's own count if it is 4-D, else head_num
    qk_scale      multiplies q·k before any bias (1 / sqrt(head_size) for most networks)
    out           written and returned if given: like query
    return_lse    also return the natural log-sum-exp of the scores, float32 [num_tokens, head_num]
    target        "auto" (CUDA for CUDA tensors, else CPU), "cpu", "cuda", "reference" (float64 NumPy)
    num_threads   most threads to use on the CPU; None: all that the process may use (get_num_threads)
    workspace     a writable byte buffer of at least the size the two-phase form reports, on a GPU an array there; None: one
                  is kept per thread, or taken on the GPU for the call
    stream        where a GPU is to compute (see Context), which is not waited for
    validate      "full", or "shape" to skip the check of the block ids' values. A table on a GPU is checked by the kernel,
                  which follows no bad id: "full" raises the error at this thread's next call for a GPU, "wait" waits for the
                  result and raises it at once. For other tables "wait" is "full"
    held_blocks   None, or bool [batch, max_block_num] on the host: attend to the keys of these blocks of each sequence
                  only, each at its own position; entries of block_tables for other blocks may hold anything

    All arrays are in one memory: the CPU's, or one GPU's. Returns out, or (out, lse), of the
    caller's kind (NumPy, torch, …). Raises TypeError and ValueError naming the argument, before
    anything is computed, and TargetUnavailableError for a target that cannot run. Into a CUDA graph
    only the two-phase form is captured.
    """
    check_choice("validate", validate, VALIDATE)
    check_flag("return_lse", return_lse)
    problem, operands = static_problem(
        query, key, value, block_tables, mask=mask, slopes=slopes, out=out, mask_type=mask_type,
        head_num=head_num, kv_head_num=kv_head_num, qk_scale=qk_scale,
    )  # fmt: skip
    lengths = check_lengths(problem, seq_len, kv_seq_len)
    held = check_held_blocks(problem, held_blocks)
    op = Op(
        problem, operands, lengths, Context(target, num_threads, stream),
        return_lse=return_lse, validate=validate, held_blocks=held, is_one_shot=True,
    )  # fmt: skip
    op.planned.run(workspace)
    op.planned.detach()
    return (op.out, op.lse) if return_lse else op.out


def plan_partial(
    query: Any,
    key: Any,
    value: Any,
    block_tables: Any,
    seq_len: Any,
    kv_seq_len: Any,
    held_blocks: Any,
    context: Context,
    **options: Any,
) -> Op:
    """An operation over a part of the keys, to be merged with others over the rest: its out is
    float32 whatever the inputs are, its lse leaves out the part_shift that all parts share.
    options: mask_type, mask, slopes, head_num, kv_head_num, qk_scale. Arguments, kinds of arrays
    and errors are those of prefix_encoder."""
    problem, operands = static_problem(query, key, value, block_tables, **options)
    lengths, held = check_lengths(problem, seq_len, kv_seq_len), check_held_blocks(problem, held_blocks)
    return Op(problem, operands, lengths, context, return_lse=True, held_blocks=held, is_part=True)


def self_attention_prefix_encoder_get_workspace_size(
    query: Any,
    key: Any,
    value: Any,
    block_tables: Any,
    mask: Any,
    seq_len: Any,
    kv_seq_len: Any,
    slopes: Any,
    mask_type: Any,
    head_num: int | None,
    kv_head_num: int | None,
    qk_scale: float,
    attn_out: Any,
    context: Context | None = None,
) -> tuple[int, Op]:
    """First phase of the two-phase form, in ATB's argument order: validate and plan.

    Arguments are those of prefix_encoder; attn_out is required. Returns the exact size of the
    workspace in bytes and the operation to run, which keeps the arrays alive.
    """
    problem, operands = static_problem(
        query, key, value, block_tables, mask=mask, slopes=slopes, out=attn_out, mask_type=mask_type,
        head_num=head_num, kv_head_num=kv_head_num, qk_scale=qk_scale,
    )  # fmt: skip
    if operands.out is None:
        raise TypeError("attn_out: got None, expected an array like query")
    lengths = check_lengths(problem, seq_len, kv_seq_len)
    op = Op(problem, operands, lengths, Context() if context is None else _check_context(context))
    return op.workspace_size, op


def self_attention_prefix_encoder(workspace: Any, workspace_size: int, op: Op, context: Context | None = None) -> None:
    """Second phase: run `op`, writing its attn_out.

    workspace: a writable buffer (bytearray, NumPy or torch array of any dtype, …) of at least
    workspace_size bytes, at any alignment, in the memory of the arrays. workspace_size: what the
    first phase returned. A context given here has to name the same target; its num_threads can take
    threads away from the number planned, not add any, its stream is this run's. On a GPU this only
    launches kernels, also into a CUDA graph that is being captured; a bad block id that an earlier
    run has met is a ValueError (Op.check waits for what was run).
    """
    if not isinstance(op, Op):
        raise TypeError(f"op: got {type(op).__name__}, expected the operation that the first phase returned")
    if isinstance(workspace_size, bool) or not isinstance(workspace_size, (int, np.integer)):
        raise TypeError(f"workspace_size: got {type(workspace_size).__name__}, expected an int")
    if workspace_size < op.workspace_size:
        raise ValueError(f"workspace_size: got {workspace_size} bytes, expected at least {op.workspace_size}")
    num_threads = stream = None
    if context is not None:
        if _check_context(context).target not in ("auto", op.target):
            raise ValueError(
                f"context: got target {context.target!r}, expected {op.target!r}, which op was planned for"
            )
        check_stream(context.stream, op.target)
        stream = context.stream
        num_threads = threads.resolved(context.num_threads)
    if workspace is None and op.workspace_size > 0:
        raise ValueError(f"workspace: got None, expected a buffer of {op.workspace_size} bytes")
    op.planned.run(workspace, num_threads, stream)


def check_flag(name: str, given: Any) -> None:
    if not isinstance(given, (bool, np.bool_)):
        raise TypeError(f"{name}: got {type(given).__name__}, expected a bool")


def _check_context(context: Any) -> Context:
    if not isinstance(context, Context):
        raise TypeError(f"context: got {type(context).__name__}, expected a Context or None")
    return context
