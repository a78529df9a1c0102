"""The oracle as a target: its float64 results, rounded to the output's dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numba_prefix.inputs.arrays import as_numpy, bits, describe
from numba_prefix.inputs.problem import Operands, Problem
from numba_prefix.planning import workspace as workspaces
from numba_prefix.planning.kv_runs import part_shift
from numba_prefix.planning.target import HostTarget, PlanOptions, refuse_path
from numba_prefix.reference import oracle
from numba_prefix.runtime import num_threads as threads


class ReferenceTarget(HostTarget):
    """An operation on the oracle; it needs no plan."""

    _bound: tuple[Problem, Operands, Any]

    def __init__(self, problem: Problem, operands: Operands, options: PlanOptions) -> None:
        super().__init__(problem, operands, options)
        threads.resolved(options.num_threads)
        refuse_path(options.path, "reference")

    @property
    def reason(self) -> str:
        return "float64 NumPy"

    @property
    def workspace_bytes(self) -> int:
        return 0

    def bind(self, problem: Problem, operands: Operands, lse: Any) -> None:
        self._bound = problem, operands, lse

    def run(self, workspace: Any, num_threads: int | None = None, stream: Any = None) -> None:
        problem, o, lse = self._bound  # read once: another thread may rebind
        options = self._options
        if not options.is_one_shot:
            self.check_tables(problem, o)
        workspaces.take(workspace, 0)
        result, log_sums = oracle.reference(
            *(o.q, o.k_cache, o.v_cache, o.block_tables),
            *options.lengths,
            **problem.options,
            mask=o.mask,
            slopes=o.slopes,
            return_lse=True,
            held_blocks=options.held_blocks,
        )
        assert o.out is not None
        bits(replace(o.out, is_writable=True))[...] = oracle.stored(result, o.out.dtype)
        if lse is not None:
            shift = part_shift(problem, o.slopes, *options.lengths) if options.is_part else None
            as_numpy(describe(lse, "lse"))[...] = log_sums if shift is None else log_sums - shift
