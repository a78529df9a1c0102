"""Planning, binding and running a problem on the CUDA target."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.cuda.device import streams
from numba_prefix.cuda.device.driver import get_driver
from numba_prefix.cuda.device.gpu import Device, get_device
from numba_prefix.cuda.kernel.params import SLOT_BYTES, Params, in_memory
from numba_prefix.cuda.kernels import Kernel, attention_kernel, merge_kernel
from numba_prefix.cuda.plan import CudaPlan
from numba_prefix.inputs.arrays import ITEM_BYTES, Tensor, describe, empty_like, span
from numba_prefix.inputs.dense import are_dense, dense_operands
from numba_prefix.inputs.problem import Operands, Problem
from numba_prefix.planning.params import ADDRESSES, FACTORS, STRIDES, addresses_of, factors_of, has_shift, strides_of
from numba_prefix.planning.target import PlanOptions, Target, refuse_path
from numba_prefix.planning.work import Cutter
from numba_prefix.planning.workspace import ALIGNMENT
from numba_prefix.rules.tiling import round_up
from numba_prefix.runtime.num_threads import resolved

# Calls of a thread whose block tables are still to be judged, before it waits for the oldest.
MAX_PENDING = 64

PARTIALS_SLOT = Params._fields.index("partials_ptr")

Launch = tuple[int, int, int, int]  # function, grid, threads, bytes of shared memory


class Parameters:
    """A Params in memory, and the addresses of its fields: what a launch reads."""

    __slots__ = ("_block", "_pointers", "address")

    def __init__(self, params: Any) -> None:
        self._block = in_memory(params)
        first = self._block.ctypes.data
        self._pointers = np.array([first + SLOT_BYTES * i for i in range(len(self._block))], np.uint64)
        self.address = int(self._pointers.ctypes.data)

    def set_partials(self, address: int) -> None:
        self._block[PARTIALS_SLOT] = address


@dataclass(slots=True, eq=False)
class Bound:
    """A plan about certain arrays, ready for any number of runs."""

    problem: Problem
    operands: Operands
    launches: tuple[Launch, ...]
    params: Any  # a Params, but for the workspace's address
    workspace_bytes: int
    memory: Any  # whatever else the addresses belong to
    copies: list[Tensor]  # copies that torch made of arrays on `copied_on`
    copied_on: int
    streams: set[int] = field(default_factory=set)  # run on so far
    # Each run takes one and puts it back: runs of several threads, or within a signal handler, have
    # different workspaces.
    spare: list[Parameters] = field(default_factory=list)


class CudaTarget(Target):
    """An operation on one GPU."""

    # Problem, operands, lse and, unless dense copies have to be bound at every run, launches.
    _bound: tuple[Problem, Operands, Any, Bound | None]

    def __init__(self, problem: Problem, operands: Operands, options: PlanOptions, cut_tiles: Cutter) -> None:
        """cut_tiles: tiling's, compiled."""
        resolved(options.num_threads)  # raises for a wrong one, as on other targets
        refuse_path(options.path, "cuda")
        self._options = options
        look_at_pending()
        if options.is_one_shot:
            refuse_capture(self._stream(None, operands.q), operands.q)
        self.plan, self._reason = plan(
            problem, operands, options.lengths, options.held_blocks, options.is_part, options.validate, cut_tiles
        )

    @staticmethod
    def available(device: str) -> None:
        """Raise TargetUnavailableError if this GPU ("cuda:0"; "cpu" for any) can't be used."""
        if device == "cpu":
            get_driver()
        else:
            get_device(_ordinal(device))

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def workspace_bytes(self) -> int:
        return self.plan.workspace_bytes

    def check_tables(self, problem: Problem, operands: Operands) -> None:
        """Raise what the kernel, which checks the block ids that it follows, has found so far."""
        self.plan.raise_pending()

    def allocate(self, q: Tensor, shape: tuple[int, ...], dtype: str) -> Any:
        with streams.scope(self._stream(None, q), q):
            return empty_like(q, shape, dtype)

    def bind(self, problem: Problem, operands: Operands, lse: Any) -> None:
        bound = None
        if are_dense(operands):
            bound = self._bind(problem, operands, lse, self._stream(None, operands.q), (operands, lse))
        self._bound = problem, operands, lse, bound

    def _bind(self, problem: Problem, dense: Operands, lse: Any, stream: int, memory: Any) -> Bound:
        assert dense.out is not None
        described = None if lse is None else describe(lse, "lse")
        return bind(self.plan, problem, dense, dense.out, described, stream, memory)

    def run(self, workspace: Any, num_threads: int | None = None, stream: Any = None) -> None:
        problem, operands, lse, bound = self._bound  # read once: another thread may rebind
        self.plan.raise_pending()
        owner = self._options.stream if stream is None else stream
        handle = self._stream(stream, operands.q)
        if bound is not None:
            run(self.plan, bound, workspace, handle, owner)
            return
        with streams.scope(handle, operands.q):
            dense = dense_operands(operands)
            run(self.plan, self._bind(problem, dense, lse, handle, (operands, dense, lse)), workspace, handle, owner)
            assert operands.out is not None
            assert dense.out is not None
            settle(self.plan, dense, dense.out, operands.out, handle)

    def check(self) -> None:
        check(self.plan)

    def detach(self) -> None:
        leave_pending(self.plan, self._stream(None, self._bound[1].q))

    def _stream(self, given: Any, q: Tensor) -> int:
        """The handle of the stream given for one run, or of that which was planned for."""
        return streams.stream_for(self._options.stream if given is None else given, q)


def plan(
    problem: Problem,
    operands: Operands,
    lengths: tuple[NDArray[np.int64], NDArray[np.int64]],
    held_blocks: NDArray[np.bool_] | None,
    is_part: bool,
    validate: str,
    cut_tiles: Cutter,
) -> tuple[CudaPlan, str]:
    """A plan, and what was chosen: the kernel family and the GPU. Arguments as CudaPlan takes
    them."""
    device = get_device(_ordinal(operands.q.device))
    with device.current(may_capture=True):
        made = CudaPlan(device, problem, lengths, held_blocks, is_part, validate, cut_tiles)
        out_dtype = "float32" if is_part else problem.dtype
        kernel = attention_kernel(device, problem, operands, out_dtype)
        if not made.is_empty:
            made.tables(kernel)
    return made, f"family {kernel.spec.family}, sm_{device.cc[0]}{device.cc[1]} ({device.name})"


def bind(
    plan: CudaPlan, problem: Problem, operands: Operands, out: Tensor, lse: Tensor | None, stream: int, memory: Any
) -> Bound:
    """operands: of the plan's shapes, each with a dense last axis. out: of the inputs' dtype or
    float32. memory: what keeps the arrays alive. stream: the one that the first run is expected on.
    """
    device = plan.device
    with device.current(may_capture=True):
        params = Params._make([0] * len(Params._fields))
        launches: tuple[Launch, ...] = ()
        workspace_bytes = 0
        if not plan.is_empty:
            kernel = attention_kernel(device, problem, operands, out.dtype)
            tables = plan.tables(kernel)
            workspace_bytes = tables.workspace_bytes
            params = _fill(plan, problem, kernel, operands, out, lse)
            launches = (_launch(kernel, tables.work_items * problem.kv_head_num),)
            if tables.split_tiles:
                merge = merge_kernel(device, kernel.spec)
                launches += (_launch(merge, tables.split_tiles * problem.kv_head_num),)
            o = operands
            read = [t for t in (o.q, o.k_cache, o.v_cache, o.block_tables, o.mask, o.slopes) if t is not None]
            streams.wait_for_producers(device, stream, [t for t in read if t.device != "cpu"])
        copies = _copies_of_torch(operands)
        copied_on = streams.current_stream(operands.q) if copies else 0
    return Bound(problem, operands, launches, params, workspace_bytes, memory, copies, copied_on)


def _fill(
    plan: CudaPlan,
    problem: Problem,
    kernel: Kernel,
    operands: Operands,
    out: Tensor,
    lse: Tensor | None,
) -> Any:
    """The Params of a plan's kernels, without the workspace's address."""
    tables = plan.tables(kernel)
    addresses = addresses_of(operands, out, lse.address if lse is not None else 0)
    of_arrays = dict(zip(ADDRESSES, addresses, strict=True)) | dict(
        zip(STRIDES, strides_of(operands, out), strict=True)
    )
    if operands.slopes is not None and operands.slopes.device == "cpu":
        of_arrays["slopes_ptr"] = plan.device_slopes(operands.slopes)
    return Params(
        **of_arrays,
        partials_ptr=0,
        work_ptr=tables.work,
        merge_ptr=tables.merge,
        sequences_ptr=tables.sequences,
        runs_ptr=tables.runs,
        status_ptr=plan.allocation.flag.address,
        kv_head_num=problem.kv_head_num,
        group_size=problem.group_size,
        head_size=problem.head_size,
        block_size=problem.block_size,
        num_blocks=problem.num_blocks,
        tile_rows=kernel.block_m,
        has_shift=has_shift(kernel.spec.bias, plan.is_part),
        **dict(zip(FACTORS, factors_of(problem.qk_scale, kernel.spec.bias), strict=True)),
    )


def _launch(kernel: Kernel, grid: int) -> Launch:
    return kernel.function, grid, kernel.threads, kernel.shared_bytes


def _copies_of_torch(operands: Operands) -> list[Tensor]:
    o = operands
    given = (o.q, o.k_cache, o.v_cache, o.block_tables, o.mask, o.slopes)
    return [t for t in given if t is not None and t.kind == "torch" and t.keeper is not None and t.device != "cpu"]


def run(plan: CudaPlan, bound: Bound, workspace: Any, stream: int, owner: Any = None) -> None:
    """Launches what `bound` is about on a stream, which belongs to `owner`; waits for it only with
    validate="wait".

    workspace: device memory of at least bound.workspace_bytes, as an array of any library; None:
    some is taken for the run. Raises ValueError for a bad block id that an earlier run has met.
    """
    device = plan.device
    address = _workspace_address(workspace, bound.workspace_bytes, bound.operands.q.device)
    plan.raise_pending()
    with device.current():
        if stream not in bound.streams:
            _prepare(plan, bound, stream, owner)
        if bound.workspace_bytes and workspace is None:
            address = device.driver.malloc(device.ordinal, bound.workspace_bytes, stream)
            try:
                _launch_all(device, bound, address, stream)
            finally:
                device.driver.free(device.ordinal, address, stream)
        else:
            _launch_all(device, bound, address, stream)
    if plan.validate == "wait":
        check(plan)


def _launch_all(device: Device, bound: Bound, workspace: int, stream: int) -> None:
    launch = device.driver.launch
    try:
        parameters = bound.spare.pop()
    except IndexError:
        parameters = Parameters(bound.params)
    parameters.set_partials(round_up(workspace, ALIGNMENT))
    for function, grid, threads, shared_bytes in bound.launches:
        launch(function, grid, threads, shared_bytes, stream, parameters.address)
    bound.spare.append(parameters)


def _prepare(plan: CudaPlan, bound: Bound, stream: int, owner: Any) -> None:
    """Make a stream ready for its first run."""
    if bound.copies and stream != bound.copied_on:
        with plan.device.current(may_capture=True):
            plan.device.driver.synchronize(bound.copied_on)
        for t in bound.copies:
            streams.record_use(t, stream)
    plan.allocation.use(stream, owner)
    plan.watch(bound.problem, bound.operands.block_tables)
    bound.streams.add(stream)


def _workspace_address(given: Any, num_bytes: int, device: str) -> int:
    if given is None:
        return 0
    expected = f"a writable contiguous buffer on {device} (query's device)"
    if isinstance(given, (bytes, bytearray, memoryview)):
        raise ValueError(f"workspace: got {type(given).__name__} in CPU memory, expected {expected}")
    t = describe(given, "workspace")
    if t.device != device or not t.is_writable:
        raise ValueError(f"workspace: got {t.device if t.is_writable else 'read-only memory'}, expected {expected}")
    first, end = span(t.shape, t.strides)
    if end - first != math.prod(t.shape) or first:
        raise ValueError(f"workspace: got an array with strides {t.strides}, expected {expected}")
    size = end * ITEM_BYTES.get(t.dtype, 1)
    if size < num_bytes:
        raise ValueError(f"workspace: got {size} bytes, expected at least {num_bytes}")
    return t.address


def settle(plan: CudaPlan, dense: Operands, target: Tensor, out: Tensor, stream: int) -> None:
    """Finish a run on copies that were made for it. torch's current stream is the one that it was
    launched on."""
    if target is not out:
        if out.kind != "torch":
            raise ValueError(f"out: got stride {out.strides[-1]} on the last axis, expected 1")
        out.owner.copy_(target.keeper)
    if any(t.kind == "dlpack" and isinstance(t.keeper, Tensor) for t in (dense.q, dense.k_cache, dense.v_cache)):
        with plan.device.current():  # its library may use a copy's memory again afterwards
            plan.device.driver.synchronize(stream)


def refuse_capture(stream: int, q: Tensor) -> None:
    """Raise ValueError for a stream that is being captured: a graph would use the memory of a plan
    that is gone by then."""
    device = get_device(_ordinal(q.device))
    with device.current():
        if device.is_capturing(stream):
            raise ValueError(
                "stream: got one that is being captured into a CUDA graph, expected the two-phase form: an operation that "
                "is planned before and lives as long as the graph"
            )


def check(plan: CudaPlan) -> None:
    """Wait for all runs; raise ValueError for a bad block id that one has met."""
    with plan.device.current(may_capture=True):
        for stream in plan.allocation.streams:
            plan.device.driver.synchronize(stream)
    plan.raise_pending()


class _Pending(threading.local):
    """Plans of calls that are over, each with an event after its run: their block tables are judged
    at the thread's next call, since no caller has the operation."""

    def __init__(self) -> None:
        self.calls: list[tuple[CudaPlan, int]] = []


_pending = _Pending()


def leave_pending(plan: CudaPlan, stream: int) -> None:
    """The plan's only run is launched."""
    if plan.validate != "full" or plan.is_empty:
        return
    device = plan.device
    with device.current(may_capture=True):
        event = device.driver.create_event()
        device.driver.record(event, stream)
        _pending.calls.append((plan, event))
        if len(_pending.calls) > MAX_PENDING:
            device.driver.finish(_pending.calls[0][1])


def look_at_pending() -> None:
    """Raise ValueError for a bad block id that an earlier call of this thread has met so far."""
    calls, _pending.calls = _pending.calls, []
    errors = []
    for plan, event in calls:
        driver = plan.device.driver
        with plan.device.current(may_capture=True):
            if not plan.allocation.flag.is_set and not driver.is_done(event):
                _pending.calls.append((plan, event))
                continue
            driver.destroy_event(event)
        try:
            plan.raise_pending()
        except ValueError as error:
            errors.append(error)
    if errors:
        raise ValueError(f"{errors[0]} (in an earlier call of this thread)")


def _ordinal(device: str) -> int:
    return int(device.removeprefix("cuda:"))
