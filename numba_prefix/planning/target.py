"""The seam between an operation and its target: options of a plan, methods of every target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import Tensor, empty_like
from numba_prefix.inputs.lengths import check_block_ids
from numba_prefix.inputs.problem import Operands, Problem

Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]  # q_len and kv_len, [batch] each, checked


class PlanOptions(NamedTuple):
    """Options of a plan: all that it depends on apart from the problem and its arrays; checked, but
    for what only a target knows."""

    lengths: Lengths
    held_blocks: NDArray[np.bool_] | None = None  # [batch, max_block_num]; None: all keys
    is_part: bool = False  # of the keys: float32 out, to be merged; see kv_runs.part_shift
    validate: str = "full"  # "full", "wait" or "shape"
    num_threads: int | None = None
    stream: Any = None  # the caller's, of any library
    pool: str = "own"  # whose threads help, as a Context says
    is_one_shot: bool = False  # run once, directly after planning; no caller sees the operation
    path: str | None = None  # the CPU's instruction-set path to take; None: the usual choice


class Target(ABC):
    """An operation on one target: planned when made, then bound to arrays and run, any number of
    times.

    Arrays and streams of callers are of any library, hence Any; lse is float32
    [num_tokens, head_num], or None.
    """

    @property
    @abstractmethod
    def reason(self) -> str:
        """The choices made for the problem and the machine, in words."""

    @property
    @abstractmethod
    def workspace_bytes(self) -> int:
        """Bytes that a run needs, exactly."""

    @abstractmethod
    def check_tables(self, problem: Problem, operands: Operands) -> None:
        """Raise ValueError for a block id that would be read and names no block; on a GPU, for one
        that a run has met."""

    @abstractmethod
    def allocate(self, q: Tensor, shape: tuple[int, ...], dtype: str) -> Any:
        """An uninitialised array of q's library and device, which the first run may write."""

    @abstractmethod
    def bind(self, problem: Problem, operands: Operands, lse: Any) -> None:
        """Take the arrays of the next runs, of the shapes and dtypes planned for; operands.out is
        not None."""

    @abstractmethod
    def run(self, workspace: Any, num_threads: int | None = None, stream: Any = None) -> None:
        """Check the block tables, unless planning just did, and compute; on a GPU, begin to.

        workspace: the caller's, of at least workspace_bytes; None: memory of the target's own.
        num_threads and stream: for this run alone; None: as planned.
        """

    @abstractmethod
    def check(self) -> None:
        """Wait for the runs so far; raise ValueError for a bad block id that one has met."""

    @abstractmethod
    def detach(self) -> None:
        """Detach a one-shot call: errors that a GPU finds later surface at this thread's next
        call."""


class HostTarget(Target):
    """A target that reads host memory, and whose runs are done when they return."""

    def __init__(self, problem: Problem, operands: Operands, options: PlanOptions) -> None:
        self._options = options
        self.check_tables(problem, operands)

    def check_tables(self, problem: Problem, operands: Operands) -> None:
        if self._options.validate != "shape":
            check_block_ids(problem, operands.block_tables, *self._options.lengths, self._options.held_blocks)

    def allocate(self, q: Tensor, shape: tuple[int, ...], dtype: str) -> Any:
        return empty_like(q, shape, dtype)

    def check(self) -> None:
        """Do nothing: runs raise their errors themselves."""

    def detach(self) -> None:
        """Do nothing: the run is done."""


def refuse_path(path: str | None, target: str) -> None:
    """Raise ValueError where a target without instruction-set paths is asked for one."""
    if path is not None:
        raise ValueError(f"path: got {path!r}, expected None for target {target!r}")
