"""What an operation asks of its target: one class for each, made when an operation is planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_prefix.front.targets import cpu_target, cuda_target
from numba_prefix.inputs.arrays import Tensor, as_numpy, bits, describe, empty_like
from numba_prefix.inputs.lengths import check_block_ids
from numba_prefix.inputs.problem import Operands, Problem, has_unit_stride, unit_stride
from numba_prefix.planning import workspace as buffers
from numba_prefix.planning.kv_runs import part_shift
from numba_prefix.reference import oracle
from numba_prefix.runtime import num_threads as threads

Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]


class Asked(NamedTuple):
    """What an operation is planned for, apart from the arrays."""

    lengths: Lengths
    held_blocks: NDArray[np.bool_] | None
    is_part: bool
    validate: str
    num_threads: int | None
    stream: Any
    pool: str
    is_single: bool  # nobody can ask for a second run, or look at the operation


class _HostRunner:
    """What targets that read host memory, and are done when a run returns, have in common."""

    def __init__(self, problem: Problem, operands: Operands, asked: Asked) -> None:
        self._asked = asked
        self.check_tables(problem, operands)
        self._num_threads = threads.resolved(asked.num_threads)

    def check_tables(self, problem: Problem, operands: Operands) -> None:
        if self._asked.validate != "shape":
            check_block_ids(problem, operands.block_tables, *self._asked.lengths, self._asked.held_blocks)

    def allocate(self, q: Tensor, shape: tuple[int, ...], dtype: str) -> Any:
        return empty_like(q, shape, dtype)

    def check(self) -> None:
        """A run has said all it had to say."""

    def leave(self) -> None:
        pass


class CpuRunner(_HostRunner):
    def __init__(self, problem: Problem, operands: Operands, asked: Asked) -> None:
        super().__init__(problem, operands, asked)
        self._cpu = cpu_target()
        self._plan = self._cpu.plan(
            problem, *asked.lengths, self._num_threads, asked.held_blocks, asked.is_part, asked.pool
        )
        self._bound: tuple[Operands, Any, Any] | None = None

    @property
    def reason(self) -> str:
        return str(self._cpu.reason(self._plan.path))

    @property
    def workspace_bytes(self) -> int:
        return int(self._plan.workspace_bytes)

    def bind(self, problem: Problem, operands: Operands, lse: Any) -> None:
        """The kernel's arguments, ready for any number of runs; arrays of which dense copies have to be made at every run are
        bound then."""
        call, out = None, operands.out
        assert out is not None
        if are_dense(operands):
            call = self._cpu.bind(self._plan, operands, out, _address(lse))
        self._bound = operands, lse, call

    def run(self, workspace: Any, num_threads: int | None, stream: Any) -> None:
        assert self._bound is not None
        operands, lse, call = self._bound  # read once: another thread may rebind
        address, buffer = buffers.take(workspace, self.workspace_bytes)
        if call is not None:
            self._cpu.run(self._plan, call, address, (buffer, operands, lse), num_threads)
        else:
            out = operands.out
            assert out is not None
            dense, target = dense_operands(operands), unit_stride(out)
            call = self._cpu.bind(self._plan, dense, target, _address(lse))
            memory = (buffer, dense, target, lse)
            self._cpu.run(self._plan, call, address, memory, num_threads)
            if target is not out:
                bits(out)[...] = bits(target)
        if workspace is None:
            buffers.give_back(buffer)


class ReferenceRunner(_HostRunner):
    reason = "float64 NumPy"
    workspace_bytes = 0

    def __init__(self, problem: Problem, operands: Operands, asked: Asked) -> None:
        super().__init__(problem, operands, asked)
        self._bound: tuple[Problem, Operands, Any] | None = None

    def bind(self, problem: Problem, operands: Operands, lse: Any) -> None:
        self._bound = problem, operands, lse

    def run(self, workspace: Any, num_threads: int | None, stream: Any) -> None:
        """The oracle's float64 result, rounded to out's dtype."""
        assert self._bound is not None
        problem, o, lse = self._bound
        buffers.take(workspace, 0)
        result, log_sums = oracle.reference(
            *(o.q, o.k_cache, o.v_cache, o.block_tables),
            *self._asked.lengths,
            mask_type=problem.mask_type,
            mask=o.mask,
            slopes=o.slopes,
            qk_scale=problem.qk_scale,
            return_lse=True,
            held_blocks=self._asked.held_blocks,
        )
        out = o.out
        assert out is not None
        bits(replace(out, is_writable=True))[...] = oracle.stored(result, out.dtype)
        if lse is not None:
            shift = part_shift(problem, o.slopes, *self._asked.lengths) if self._asked.is_part else None
            as_numpy(describe(lse, "lse"))[...] = log_sums if shift is None else log_sums - shift


class CudaRunner:
    def __init__(self, problem: Problem, operands: Operands, asked: Asked) -> None:
        threads.resolved(asked.num_threads)
        self._asked = asked
        self._cuda = cuda_target()
        self._cuda.look_at_pending()
        if asked.is_single:
            self._cuda.refuse_capture(self._stream(None, operands.q), operands.q)
        self._plan, self.reason = self._cuda.plan(
            problem, operands, asked.lengths, asked.held_blocks, asked.is_part, asked.validate, cpu_target().cutter()
        )
        self._bound: tuple[Problem, Operands, Any, Any] | None = None

    @property
    def workspace_bytes(self) -> int:
        return int(self._plan.workspace_bytes)

    def _stream(self, given: Any, q: Tensor) -> int:
        return int(self._cuda.streams.stream_for(self._asked.stream if given is None else given, q))

    def check_tables(self, problem: Problem, operands: Operands) -> None:
        """Block ids are checked by the kernel that follows them: what it has found so far."""
        self._plan.raise_pending()

    def allocate(self, q: Tensor, shape: tuple[int, ...], dtype: str) -> Any:
        with self._cuda.streams.scope(self._stream(None, q), q):
            return empty_like(q, shape, dtype)

    def bind(self, problem: Problem, operands: Operands, lse: Any) -> None:
        call, out = None, operands.out
        assert out is not None
        if are_dense(operands):
            call = self._bind(problem, operands, out, lse, self._stream(None, operands.q), (operands, lse))
        self._bound = problem, operands, lse, call

    def _bind(self, problem: Problem, operands: Operands, out: Tensor, lse: Any, stream: int, memory: Any) -> Any:
        described = None if lse is None else describe(lse, "lse")
        return self._cuda.bind(self._plan, problem, operands, out, described, stream, memory)

    def run(self, workspace: Any, num_threads: int | None, stream: Any) -> None:
        assert self._bound is not None
        problem, operands, lse, call = self._bound
        owner = self._asked.stream if stream is None else stream
        handle = self._stream(stream, operands.q)
        if call is not None:
            self._cuda.run(self._plan, call, workspace, handle, owner)
            return
        out = operands.out
        assert out is not None
        with self._cuda.streams.scope(handle, operands.q):
            dense, target = dense_operands(operands), unit_stride(out)
            call = self._bind(problem, dense, target, lse, handle, (operands, dense, target, lse))
            self._cuda.run(self._plan, call, workspace, handle, owner)
            self._cuda.settle(self._plan, dense, target, out, handle)

    def check(self) -> None:
        self._cuda.check(self._plan)

    def leave(self) -> None:
        """The only run is launched."""
        assert self._bound is not None
        self._cuda.leave_pending(self._plan, self._stream(None, self._bound[1].q))


Runner = CpuRunner | CudaRunner | ReferenceRunner
RUNNERS: dict[str, type[CpuRunner] | type[CudaRunner] | type[ReferenceRunner]] = {
    "cpu": CpuRunner,
    "cuda": CudaRunner,
    "reference": ReferenceRunner,
}


def are_dense(o: Operands) -> bool:
    """Whether no copies are needed: unit_stride would give back what it gets."""
    for t in (o.q, o.k_cache, o.v_cache, o.slopes, o.out):  # noqa: SIM110 - a generator takes 1 us more
        if t is not None and not has_unit_stride(t):
            return False
    return True


def dense_operands(o: Operands) -> Operands:
    """With dense copies of inputs whose last axis is strided."""
    slopes = unit_stride(o.slopes) if o.slopes is not None else None
    dense = {name: unit_stride(getattr(o, name)) for name in ("q", "k_cache", "v_cache")}
    return o._replace(**dense, slopes=slopes)


def _address(lse: Any) -> int:
    return 0 if lse is None else describe(lse, "lse").address
