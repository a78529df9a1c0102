"""One problem on several targets or instruction-set paths: which results are wrong, and where
first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.cpu.paths import PATHS
from numba_prefix.front.operation import Context
from numba_prefix.inputs.arrays import as_numpy, bits, describe
from numba_prefix.reference import Budget, budget, naive, reference
from numba_prefix.verify.testing import Inputs, on_host, take_rows

TARGETS = ("cpu", "cuda", "reference")
NAMES = (*TARGETS, *(path.name for path in PATHS))
TILE_KEYS = 128  # keys of a tile that is searched, rounded to whole blocks


@dataclass(frozen=True, slots=True)
class Fault:
    """The first wrong element of an output: its place, and where it comes from."""

    sequence: int
    row: int  # query token of the sequence
    head: int
    dim: int
    got: float
    expected: float
    keys: (
        tuple[int, int] | None
    )  # positions of the first key tile that alone is wrong too; None: every tile alone is right
    is_alone: bool  # whether the sequence without its batch mates is wrong too


@dataclass(frozen=True, slots=True)
class Judged:
    """A contender's errors against the float64 oracle, and its first fault."""

    name: str
    reason: str
    error: Budget
    fault: Fault | None


def compare(inputs: Inputs, names: Sequence[str], num_threads: int | None = None) -> list[Judged]:
    """Compute a problem with a 3-D query on each of `names` (of NAMES) and judge the outputs by the
    oracle.

    An element is wrong if it is further from the oracle than the error budget allows, or not finite
    where the oracle is. Raises what planning raises: ValueError for a path that this machine lacks,
    TargetUnavailableError for a target.
    """
    expected, plain = _oracle(inputs, None)
    judged = []
    for name in names:
        out, reason = _run(inputs, name, num_threads, None)
        error = budget(out, expected, plain)
        wrong = _wrong(out, expected, error.max_allowed)
        fault = _fault(inputs, name, num_threads, wrong, out, expected) if wrong.any() else None
        judged.append(Judged(name, reason, error, fault))
    return judged


def _run(inputs: Inputs, name: str, num_threads: int | None, held_blocks: Any) -> tuple[Any, str]:
    target, path = (name, None) if name in TARGETS else ("cpu", name)
    op, out = inputs.plan(Context(target, num_threads), path, held_blocks)
    op.run()
    op.check()
    return on_host(out), op.reason


def _oracle(inputs: Inputs, held_blocks: Any) -> tuple[Any, Any]:
    """Outputs in float64, and computed plainly in float32."""
    arguments = inputs.arguments() | {"held_blocks": held_blocks}
    return reference(**arguments), naive(**arguments)


def _wrong(out: Any, expected: NDArray[np.float64], allowed: float) -> NDArray[np.bool_]:
    """Whether each element is wrong, bool [as expected]."""
    got = _values(out)
    is_same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        is_near = np.abs(got - expected) <= allowed  # false for a NaN or an infinity on either side
    return ~(is_same | is_near)


def _values(out: Any) -> NDArray[np.float64]:
    t = describe(out, "out")
    if t.dtype == "bfloat16":
        return (bits(t).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return as_numpy(t).astype(np.float64)


def _fault(
    inputs: Inputs,
    name: str,
    num_threads: int | None,
    wrong: NDArray[np.bool_],
    out: Any,
    expected: NDArray[np.float64],
) -> Fault:
    token, head, dim = (int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    starts = np.cumsum([0, *inputs.seq_len])
    sequence = int(np.searchsorted(starts, token, side="right")) - 1
    row = token - int(starts[sequence])
    alone = _sequence(inputs, sequence)
    is_alone = bool(_is_wrong(alone, name, num_threads, None, row, head))
    keys = _first_wrong_tile(alone, name, num_threads, row, head) if is_alone else None
    got, right = float(_values(out)[token, head, dim]), float(expected[token, head, dim])
    return Fault(sequence, row, head, dim, got, right, keys, is_alone)


def _sequence(inputs: Inputs, sequence: int) -> Inputs:
    """The problem of one sequence alone."""
    start = int(sum(inputs.seq_len[:sequence]))
    q_len, kv_len = int(inputs.seq_len[sequence]), int(inputs.kv_seq_len[sequence])
    return replace(
        inputs,
        query=take_rows(inputs.query, np.arange(start, start + q_len)),
        block_tables=take_rows(inputs.block_tables, np.array([sequence])),
        seq_len=[q_len],
        kv_seq_len=[kv_len],
    )


def _is_wrong(inputs: Inputs, name: str, num_threads: int | None, held_blocks: Any, row: int, head: int) -> bool:
    expected, plain = _oracle(inputs, held_blocks)
    out, _ = _run(inputs, name, num_threads, held_blocks)
    allowed = budget(out, expected, plain).max_allowed
    return bool(_wrong(out, expected, allowed)[row, head].any())


def _first_wrong_tile(
    inputs: Inputs, name: str, num_threads: int | None, row: int, head: int
) -> tuple[int, int] | None:
    """The first key tile whose keys alone, as held blocks, give this row and head a wrong
    output."""
    block_size, width = describe(inputs.key, "key").shape[1], describe(inputs.block_tables, "block_tables").shape[1]
    (kv_len,) = inputs.kv_seq_len
    step = max(1, TILE_KEYS // block_size)
    for block in range(0, -(-kv_len // block_size), step):
        held = np.zeros((1, width), np.bool_)
        held[0, block : block + step] = True
        if _is_wrong(inputs, name, num_threads, held, row, head):
            return block * block_size, min((block + step) * block_size, kv_len)
    return None
