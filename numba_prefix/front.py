"""The one door: validate, choose a target, plan, run; in one call or in ATB's two phases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix import buffers
from numba_prefix import reference as oracle
from numba_prefix.arrays import Tensor, as_numpy, bits, contiguous_strides, describe, empty_like
from numba_prefix.cpu import threads
from numba_prefix.errors import TargetUnavailableError
from numba_prefix.held import part_shift
from numba_prefix.problem import (
    Operands,
    Problem,
    check_block_ids,
    check_held_blocks,
    check_lengths,
    static_problem,
    unit_stride,
)
from numba_prefix.uninterrupted import cpu_target

TARGETS = ("auto", "cpu", "cuda", "reference")
VALIDATE = ("full", "shape")


@dataclass(frozen=True, slots=True)
class Context:
    """How to run, apart from what: `target` ("auto", "cpu", "cuda", "reference"), `num_threads` (CPU; None: all that the
    process may use; never more than set_num_threads and NUMBA_PREFIX_NUM_THREADS allow) and `stream` (CUDA)."""

    target: str = "auto"
    num_threads: int | None = None
    stream: Any = None


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
    """Attention of packed variable-length queries over a paged KV cache; ATB's SelfAttention PrefixEncoder.

    query         float16, bfloat16 or float32 [num_tokens, head_num, head_size] or [num_tokens, head_num * head_size]
    key, value    as query, [num_blocks, block_size, kv_head_num, head_size] (or the last two joined): the paged cache
    block_tables  int32 [batch, max_block_num]: physical blocks of each sequence, in order
    seq_len       query tokens of each sequence, [batch], on the host; the last of its kv_seq_len tokens
    kv_seq_len    total key tokens of each sequence, [batch], on the host
    mask_type     MaskType, number or name: "causal", "none", "alibi", "alibi_sqrt", "alibi_left_align", …
    mask          None, or ATB's ALiBi template [256, 256] or [head_num, mask_len, 128], query's dtype or float32
    slopes        float32 [head_num], for the ALiBi kinds: the paper's positive slopes when mask is None
    head_num      may be left out when query is 3-D
    kv_head_num   0: head_num; None: the cache's own count if it is 4-D, else head_num
    qk_scale      multiplies q·k before any bias (1 / sqrt(head_size) for most networks)
    out           written and returned if given: like query
    return_lse    also return the natural log-sum-exp of the scores, float32 [num_tokens, head_num]
    target        "auto" (CUDA for CUDA tensors, else CPU), "cpu", "cuda", "reference" (float64 NumPy)
    num_threads   most threads to use on the CPU; None: all that the process may use (get_num_threads)
    workspace     a writable byte buffer of at least the size the two-phase form reports; None: one is kept per thread
    validate      "full", or "shape" to skip the check of the block ids' values
    held_blocks   None, or bool [batch, max_block_num] on the host: attend to the keys of these blocks of each sequence
                  only, each at its own position; entries of block_tables for other blocks may hold anything

    Returns out, or (out, lse), of the caller's kind (NumPy, torch, …). Raises TypeError and ValueError naming the
    argument, before anything is computed, and TargetUnavailableError for a target that cannot run.
    """
    _check_choice("validate", validate, VALIDATE)
    check_flag("return_lse", return_lse)
    problem, operands = static_problem(
        query, key, value, block_tables, mask=mask, slopes=slopes, out=out, mask_type=mask_type,
        head_num=head_num, kv_head_num=kv_head_num, qk_scale=qk_scale,
    )  # fmt: skip
    lengths = check_lengths(problem, seq_len, kv_seq_len)
    held = check_held_blocks(problem, held_blocks)
    operation = Op(problem, operands, lengths, Context(target, num_threads, stream), return_lse, validate, held)
    if out is None:
        operation._allocate_out(query, problem.dtype)
    operation._run(workspace)
    return (operation.out, operation.lse) if return_lse else operation.out


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
    """An operation over a part of the keys, to be merged with others over the rest: its out is float32 whatever the inputs
    are, its lse leaves out the part_shift that all parts share. options: mask_type, mask, slopes, head_num, kv_head_num,
    qk_scale. Arguments, kinds of arrays and errors are those of prefix_encoder."""
    problem, operands = static_problem(query, key, value, block_tables, **options)
    lengths, held = check_lengths(problem, seq_len, kv_seq_len), check_held_blocks(problem, held_blocks)
    operation = Op(problem, operands, lengths, context, return_lse=True, held_blocks=held, is_part=True)
    operation._allocate_out(query, "float32")
    return operation


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

    Arguments are those of prefix_encoder; attn_out is required. Returns the exact size of the workspace in bytes and the
    operation to run, which keeps the arrays alive.
    """
    problem, operands = static_problem(
        query, key, value, block_tables, mask=mask, slopes=slopes, out=attn_out, mask_type=mask_type,
        head_num=head_num, kv_head_num=kv_head_num, qk_scale=qk_scale,
    )  # fmt: skip
    if operands.out is None:
        raise TypeError("attn_out: got None, expected an array like query")
    lengths = check_lengths(problem, seq_len, kv_seq_len)
    operation = Op(problem, operands, lengths, Context() if context is None else _check_context(context))
    return operation.workspace_size, operation


def self_attention_prefix_encoder(workspace: Any, workspace_size: int, op: Op, context: Context | None = None) -> None:
    """Second phase: run `op`, writing its attn_out.

    workspace: a writable buffer (bytearray, NumPy or torch CPU array of any dtype, …) of at least workspace_size bytes, at
    any alignment. workspace_size: what the first phase returned. A context given here has to name the same target; its
    num_threads can take threads away from the number planned, not add any.
    """
    if not isinstance(op, Op):
        raise TypeError(f"op: got {type(op).__name__}, expected the operation that the first phase returned")
    if isinstance(workspace_size, bool) or not isinstance(workspace_size, (int, np.integer)):
        raise TypeError(f"workspace_size: got {type(workspace_size).__name__}, expected an int")
    if workspace_size < op.workspace_size:
        raise ValueError(f"workspace_size: got {workspace_size} bytes, expected at least {op.workspace_size}")
    num_threads = None
    if context is not None:
        if _check_context(context).target not in ("auto", op.target):
            raise ValueError(
                f"context: got target {context.target!r}, expected {op.target!r}, which op was planned for"
            )
        _check_stream(context.stream, op.target)
        num_threads = threads.resolved(context.num_threads)
    if workspace is None and op.workspace_size > 0:
        raise ValueError(f"workspace: got None, expected a buffer of {op.workspace_size} bytes")
    op._check_tables(op.problem, op._operands)
    op._run(workspace, num_threads)


class Op:
    """A planned operation. It can be run again, and bound to other arrays of the same shapes and dtypes: one plan serves
    all layers of a network."""

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        lengths: tuple[NDArray[np.int64], NDArray[np.int64]],
        context: Context,
        return_lse: bool = False,
        validate: str = "full",
        held_blocks: NDArray[np.bool_] | None = None,
        is_part: bool = False,
    ) -> None:
        self.problem = problem
        self.lse: Any = None
        self.target, self.reason = _choose_target(operands.q, context)
        self._operands = operands
        self._lengths = lengths
        self._validate = validate
        self._held_blocks, self._is_part = held_blocks, is_part
        self._check_tables(problem, operands)
        self._plan: Any = None
        if self.target == "cpu":
            self._plan = cpu_target().plan(
                problem, *lengths, threads.resolved(context.num_threads), held_blocks, is_part
            )
        else:
            threads.resolved(context.num_threads)
        self.out: Any = None
        self._bound: tuple[NDArray[np.int64], Any] | None = None
        if return_lse:
            self.lse = empty_like(operands.q, (problem.num_tokens, problem.head_num), "float32")
        self._bind()

    @property
    def part_shift(self) -> NDArray[np.float32] | None:
        """What lse leaves out: None, or for a part of the keys float32 [num_tokens, head_num]."""
        return part_shift(self.problem, self._operands.slopes, *self._lengths) if self._is_part else None

    @property
    def workspace_size(self) -> int:
        """Bytes that a run needs, exactly."""
        return self._plan.workspace_bytes if self._plan is not None else 0

    def run(self, workspace: Any = None) -> None:
        """Compute, writing out. workspace None: a buffer kept for the calling thread.

        Arrays are read in place, so later contents count; but block tables that aren't int32 and misaligned arrays are
        copied when planned and bound. Raises ValueError for a bad block id that was put into a table since."""
        self._check_tables(self.problem, self._operands)
        self._run(workspace)

    def _run(self, workspace: Any, num_threads: int | None = None) -> None:
        address, buffer = buffers.take(workspace, self.workspace_size)
        bound = self._bound  # read once: another thread may rebind
        if bound is not None:
            call, memory = bound
            cpu_target().run(self._plan, call, address, (buffer, memory), num_threads)
        else:
            self._run_unbound(address, buffer, num_threads)
        if workspace is None:
            buffers.give_back(buffer)

    def _run_unbound(self, workspace_address: int, workspace: Any, num_threads: int | None) -> None:
        """A target without a bound call, or arrays of which dense copies have to be made at every run."""
        out = self._operands.out
        assert out is not None
        dense, target = self._dense_operands(), unit_stride(out)
        lse = None if self.lse is None else describe(self.lse, "lse")
        if self.target == "cpu":
            cpu = cpu_target()
            call = cpu.bind(self._plan, dense, target, lse.address if lse else 0)
            cpu.run(self._plan, call, workspace_address, (workspace, dense, target, self.lse), num_threads)
        else:
            _run_reference(self.problem, dense, self._lengths, self._held_blocks, target, lse, self.part_shift)
        if target is not out:
            bits(out)[...] = bits(target)

    def _bind(self) -> None:
        """The kernel's arguments, ready for any number of runs."""
        o = self._operands
        self.out = o.out.owner if o.out is not None else None
        self._bound = None
        if self.target == "cpu" and o.out is not None and self._dense_operands() is o and unit_stride(o.out) is o.out:
            lse = describe(self.lse, "lse").address if self.lse is not None else 0
            self._bound = cpu_target().bind(self._plan, o, o.out, lse), (o, self.lse)

    def rebind(
        self,
        *,
        query: Any = None,
        key: Any = None,
        value: Any = None,
        block_tables: Any = None,
        mask: Any = None,
        slopes: Any = None,
        attn_out: Any = None,
    ) -> Op:
        """Take other arrays for the next run, of the same shapes, dtypes and device; those left out stay. Returns self.

        Raises TypeError and ValueError as planning did; block ids are checked for a new table or a smaller cache. After an
        error the operation is bound as before."""
        old = self._operands
        kept = {"q": query, "k_cache": key, "v_cache": value, "block_tables": block_tables, "mask": mask}
        kept |= {"slopes": slopes, "out": attn_out}
        given = {
            name: new if new is not None else (part.owner if (part := getattr(old, name)) is not None else None)
            for name, new in kept.items()
        }
        problem, operands = static_problem(
            given["q"], given["k_cache"], given["v_cache"], given["block_tables"], mask=given["mask"],
            slopes=given["slopes"], out=given["out"], mask_type=self.problem.mask_type, head_num=self.problem.head_num,
            kv_head_num=self.problem.kv_head_num, qk_scale=self.problem.qk_scale,
            out_dtype=old.out.dtype if old.out is not None else None,
        )  # fmt: skip
        if replace(problem, num_blocks=0) != replace(self.problem, num_blocks=0) or operands.q.device != old.q.device:
            raise ValueError(f"rebind: got {problem}, expected what was planned: {self.problem}")
        if block_tables is not None or problem.num_blocks < self.problem.num_blocks:
            self._check_tables(problem, operands)
        self.problem, self._operands = problem, operands
        self._bind()
        return self

    def _allocate_out(self, query: Any, dtype: str) -> None:
        q = self._operands.q
        shape = tuple(query.shape) if q.kind != "dlpack" else describe(query, "query").shape
        made = describe(empty_like(q, shape, dtype), "out")
        made.shape, made.strides = q.shape, contiguous_strides(q.shape)
        self._operands = replace(self._operands, out=made)
        self._bind()

    def _check_tables(self, problem: Problem, operands: Operands) -> None:
        if self._validate == "full":
            check_block_ids(problem, operands.block_tables, *self._lengths, self._held_blocks)

    def _dense_operands(self) -> Operands:
        o = self._operands
        dense = (o.q, o.k_cache, o.v_cache, o.slopes)
        if all(t is None or t.shape[-1] == 1 or t.strides[-1] == 1 for t in dense):
            return o
        slopes = unit_stride(o.slopes) if o.slopes is not None else None
        return replace(
            o, q=unit_stride(o.q), k_cache=unit_stride(o.k_cache), v_cache=unit_stride(o.v_cache), slopes=slopes
        )


def _check_choice(name: str, given: Any, accepted: tuple[str, ...]) -> None:
    if not isinstance(given, str):
        raise TypeError(f"{name}: got {type(given).__name__}, expected one of {', '.join(map(repr, accepted))}")
    if given not in accepted:
        raise ValueError(f"{name}: got {given!r}, expected one of {', '.join(map(repr, accepted))}")


def check_flag(name: str, given: Any) -> None:
    if not isinstance(given, (bool, np.bool_)):
        raise TypeError(f"{name}: got {type(given).__name__}, expected a bool")


def _choose_target(q: Tensor, context: Context) -> tuple[str, str]:
    """(target, why); an explicit target that cannot run raises."""
    _check_choice("target", context.target, TARGETS)
    target = context.target
    if target == "auto":
        target = "cpu" if q.device == "cpu" else "cuda"
    if target == "cuda":
        raise TargetUnavailableError("target: got 'cuda', expected 'cpu' or 'reference': there are no CUDA kernels yet")
    if q.device != "cpu":
        raise ValueError(f"query: got memory on {q.device}, expected CPU memory for target {target!r}")
    _check_stream(context.stream, target)
    chosen = "asked for" if context.target == target else "query is in CPU memory"
    how = cpu_target().reason() if target == "cpu" else "float64 NumPy"
    return target, f"{chosen}; {how}"


def _check_context(context: Any) -> Context:
    if not isinstance(context, Context):
        raise TypeError(f"context: got {type(context).__name__}, expected a Context or None")
    return context


def _check_stream(stream: Any, target: str) -> None:
    if stream is not None:
        raise ValueError(f"stream: got {stream!r}, expected None for target {target!r}")


def _run_reference(
    problem: Problem,
    operands: Operands,
    lengths: tuple[NDArray[np.int64], NDArray[np.int64]],
    held_blocks: NDArray[np.bool_] | None,
    out: Tensor,
    lse: Tensor | None,
    part_shift: NDArray[np.float32] | None,
) -> None:
    """The oracle's float64 result, rounded to out's dtype."""
    o = operands
    result, log_sums = oracle.reference(
        *(o.q, o.k_cache, o.v_cache, o.block_tables),
        *lengths,
        mask_type=problem.mask_type,
        mask=o.mask,
        slopes=o.slopes,
        qk_scale=problem.qk_scale,
        return_lse=True,
        held_blocks=held_blocks,
    )
    bits(replace(out, is_writable=True))[...] = oracle.stored(result, out.dtype)
    if lse is not None:
        as_numpy(lse)[...] = log_sums if part_shift is None else log_sums - part_shift
