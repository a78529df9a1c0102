"""A planned operation: what it is for, the target that it runs on, and the arrays that it is bound
to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.front.targets import cuda_target, plan_on
from numba_prefix.inputs.arrays import Tensor, contiguous_strides, describe
from numba_prefix.inputs.problem import Operands, Problem, static_problem
from numba_prefix.planning.kv_runs import part_shift
from numba_prefix.planning.target import Lengths, PlanOptions, Target

TARGETS = ("auto", "cpu", "cuda", "reference")
VALIDATE = ("full", "wait", "shape")
POOLS = ("own", "torch")


@dataclass(frozen=True, slots=True)
class Context:
    """The way to run an operation: `target` ("auto", "cpu", "cuda", "reference"), `num_threads`
    (CPU; None: all that the process may use; never more than set_num_threads and
    NUMBA_PREFIX_NUM_THREADS allow) and `stream` (CUDA: an integer handle, or a stream of torch,
    CuPy, Numba or another library with `__cuda_stream__`, which has to live as long as what was
    planned with it; None: the current one of torch or CuPy if the arrays are theirs, else the
    legacy default stream).

    pool, on the CPU: whose threads help the caller's. "own": ones that sleep between calls.
    "torch": those of PyTorch's OpenMP, which are awake for milliseconds after each of its
    operations, and in the way of any others: for calls between such operations, on their thread.
    Where these are not available (in a forked process, with an OpenMP that is not GNU's, fewer than
    asked for) it is the same as "own"."""

    target: str = "auto"
    num_threads: int | None = None
    stream: Any = None
    pool: str = "own"


class Op:
    """A planned operation. It can be run again, and bound to other arrays of the same shapes and
    dtypes: one plan serves all layers of a network. On a GPU it has to live as long as CUDA graphs
    that its runs were captured into."""

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        lengths: Lengths,
        context: Context,
        *,
        return_lse: bool = False,
        validate: str = "full",
        held_blocks: NDArray[np.bool_] | None = None,
        is_part: bool = False,
        is_one_shot: bool = False,
        path: str | None = None,
    ) -> None:
        """Options are those of PlanOptions. An output is allocated if the operands have none: as
        query, or float32 for a part of the keys."""
        self.problem = problem
        self.target, self._chosen = choose_target(operands.q, context)
        self._options = PlanOptions(
            lengths, held_blocks, is_part, validate, context.num_threads, context.stream, context.pool,
            is_one_shot, path,
        )  # fmt: skip
        self.planned: Target = plan_on(self.target, problem, operands, self._options)
        o, out = operands, operands.out
        self.lse: Any = None
        if return_lse:
            self.lse = self.planned.allocate(o.q, (problem.num_tokens, problem.head_num), "float32")
        if out is None:
            out = _new_out(self.planned, o.q, "float32" if is_part else problem.dtype)
            operands = Operands(o.q, o.k_cache, o.v_cache, o.block_tables, o.mask, o.slopes, out)
        self.out: Any = out.owner
        self._operands = operands
        self.planned.bind(problem, operands, self.lse)

    @property
    def reason(self) -> str:
        """The reason for this target, and the choices made for its kernels."""
        return f"{self._chosen}; {self.planned.reason}"

    @property
    def part_shift(self) -> NDArray[np.float32] | None:
        """The shift that lse leaves out: None, or for a part of the keys float32 [num_tokens,
        head_num]."""
        options = self._options
        return part_shift(self.problem, self._operands.slopes, *options.lengths) if options.is_part else None

    @property
    def workspace_size(self) -> int:
        """Bytes that a run needs, exactly."""
        return self.planned.workspace_bytes

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles: what is planned is bound to these arrays' memory."""
        raise TypeError("Op: got a request for a copy or a pickle, expected another operation to be planned")

    def run(self, workspace: Any = None) -> None:
        """Compute, writing out. workspace None: a buffer kept for the calling thread, or device
        memory for this run.

        Arrays are read in place, so later contents count; but block tables that aren't int32 and
        misaligned arrays are copied when planned and bound, and slopes in host memory are copied to
        a GPU then. Raises ValueError for a bad block id that was put into a table since; on a GPU,
        where runs are only begun, for one that an earlier run has met."""
        self.planned.run(workspace)

    def check(self) -> None:
        """Wait for the runs so far; raises ValueError for a bad block id that one of them, or a
        CUDA graph that is done, has met. On the CPU runs are done and have raised it themselves."""
        self.planned.check()

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
        """Take other arrays for the next run, of the same shapes, dtypes and device; those left out
        stay. Returns self.

        Raises TypeError and ValueError as planning did; block ids are checked for a new table or a
        smaller cache. After an error the operation is bound as before."""
        old = self._operands
        kept = {"q": query, "k_cache": key, "v_cache": value, "block_tables": block_tables, "mask": mask}
        kept |= {"slopes": slopes, "out": attn_out}
        given = {
            name: new if new is not None else (part.owner if (part := getattr(old, name)) is not None else None)
            for name, new in kept.items()
        }
        problem, operands = static_problem(
            given["q"], given["k_cache"], given["v_cache"], given["block_tables"], mask=given["mask"],
            slopes=given["slopes"], out=given["out"], head_num=self.problem.head_num,
            kv_head_num=self.problem.kv_head_num, **self.problem.options,
            out_dtype=old.out.dtype if old.out is not None else None, known_slopes=old.slopes,
        )  # fmt: skip
        if replace(problem, num_blocks=0) != replace(self.problem, num_blocks=0) or operands.q.device != old.q.device:
            raise ValueError(f"rebind: got {problem}, expected what was planned: {self.problem}")
        if block_tables is not None or problem.num_blocks < self.problem.num_blocks or self.target == "cuda":
            self.planned.check_tables(problem, operands)
        assert operands.out is not None
        self.planned.bind(problem, operands, self.lse)
        self.problem, self._operands, self.out = problem, operands, operands.out.owner
        return self


def _new_out(planned: Target, q: Tensor, dtype: str) -> Tensor:
    """An output shaped as the caller's query, described as operands are."""
    query = q.owner
    shape = tuple(query.shape) if q.kind != "dlpack" else describe(query, "query").shape
    made = describe(planned.allocate(q, shape, dtype), "out")
    made.shape, made.strides = q.shape, contiguous_strides(q.shape)
    return made


def check_choice(name: str, given: Any, accepted: tuple[str, ...]) -> None:
    if not isinstance(given, str):
        raise TypeError(f"{name}: got {type(given).__name__}, expected one of {', '.join(map(repr, accepted))}")
    if given not in accepted:
        raise ValueError(f"{name}: got {given!r}, expected one of {', '.join(map(repr, accepted))}")


def choose_target(q: Tensor, context: Context) -> tuple[str, str]:
    """(target, why); an explicit target that cannot run raises."""
    check_choice("target", context.target, TARGETS)
    check_choice("pool", context.pool, POOLS)
    target = context.target
    if target == "auto":
        target = "cpu" if q.device == "cpu" else "cuda"
    if target == "cuda":
        cuda_target().available(q.device)
        if q.device == "cpu":
            raise ValueError(f"query: got memory on {q.device}, expected CUDA memory for target {target!r}")
    elif q.device != "cpu":
        raise ValueError(f"query: got memory on {q.device}, expected CPU memory for target {target!r}")
    else:
        check_stream(context.stream, target)
    if context.pool != "own" and target != "cpu":
        raise ValueError(f"pool: got {context.pool!r}, expected 'own' for target {target!r}")
    where = "in CPU memory" if q.device == "cpu" else f"on {q.device}"
    return target, "asked for" if context.target == target else f"query is {where}"


def check_stream(stream: Any, target: str) -> None:
    if stream is not None and target != "cuda":
        raise ValueError(f"stream: got {stream!r}, expected None for target {target!r}")
