"""Checks of a call's host-side arguments: lengths, held blocks, and the block ids to be read.

Messages are those of problem.py: "<argument>: got <what>, expected <what>".
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import Tensor, as_numpy, describe
from numba_prefix.inputs.problem import INT32_MAX, INTEGER_DTYPES, Problem

SHORT_LIST = 64  # longer lists are not cached
SMALL_TABLE = 1 << 14  # entries; a larger table may be mostly unread


def check_lengths(problem: Problem, seq_len: Any, kv_seq_len: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 [batch] each: query tokens and total key tokens of every sequence, checked against the
    problem.

    Takes lists, tuples, NumPy arrays and CPU tensors of any integer type, [batch]. A sequence
    without query tokens may have any kv_seq_len >= 0. Raises TypeError (bool, float, GPU memory)
    and ValueError, naming the sequence.
    """
    if _are_short_lists(seq_len, kv_seq_len):
        return _known_lengths(problem, tuple(seq_len), tuple(kv_seq_len))
    return _check_lengths(problem, seq_len, kv_seq_len)


def _are_short_lists(*lengths: Any) -> bool:
    return all(type(x) in (list, tuple) and len(x) <= SHORT_LIST and set(map(type, x)) == {int} for x in lengths)


@lru_cache(maxsize=64)
def _known_lengths(
    problem: Problem, seq_len: tuple[int, ...], kv_seq_len: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Checked lengths, cached since all layers of a network pass the same ones: 4 us instead of
    23."""
    lengths = _check_lengths(problem, seq_len, kv_seq_len)
    for array in lengths:
        array.flags.writeable = False
    return lengths


def _check_lengths(problem: Problem, seq_len: Any, kv_seq_len: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    q_len = _host_lengths(seq_len, "seq_len", problem.batch)
    kv_len = _host_lengths(kv_seq_len, "kv_seq_len", problem.batch)
    limit = min(_capacity(problem), INT32_MAX)
    if problem.mask_form == "heads":
        limit = min(limit, problem.mask_len)
    # One sign bit for every bound: 0 <= q_len <= kv_len <= limit.
    if np.count_nonzero((q_len | kv_len | (kv_len - q_len) | (limit - kv_len)) < 0):
        _check_each_length(problem, q_len, kv_len, limit)
    total = int(np.add.reduce(q_len))
    if total != problem.num_tokens:
        raise ValueError(f"seq_len: got lengths that sum to {total}, expected {problem.num_tokens} (query's tokens)")
    return q_len, kv_len


def check_held_blocks(problem: Problem, held_blocks: Any) -> NDArray[np.bool_] | None:
    """A copy, bool [batch, max_block_num], of a host-side array of that shape; None stays None.

    Raises TypeError for another type or GPU memory, ValueError for another shape.
    """
    if held_blocks is None:
        return None
    t = describe(held_blocks, "held_blocks")
    if t.device != "cpu":
        raise TypeError(f"held_blocks: got one on {t.device}, expected a host-side array (NumPy, CPU tensor)")
    if t.dtype != "bool":
        raise TypeError(f"held_blocks: got dtype {t.dtype}, expected bool")
    expected = (problem.batch, problem.max_block_num)
    if t.shape != expected:
        raise ValueError(f"held_blocks: got shape {t.shape}, expected {expected}, that of block_tables")
    return np.array(as_numpy(t))


def check_block_ids(
    problem: Problem,
    block_tables: Tensor,
    q_len: NDArray[np.int64],
    kv_len: NDArray[np.int64],
    held_blocks: NDArray[np.bool_] | None = None,
) -> None:
    """Raise bad_block_error for the first block id that would be read and names no block. The table
    is on the CPU.

    Lengths and held_blocks are as check_lengths and check_held_blocks return them. Entries past
    ceil(kv_len / block_size), and those of blocks that are not held, do not matter.
    """
    table = as_numpy(block_tables)
    if 0 < table.size <= SMALL_TABLE and np.maximum.reduce(table.view(np.uint32), axis=None) < problem.num_blocks:
        return  # as unsigned numbers, ids below zero are large
    num_read = np.where(q_len > 0, -(-kv_len // problem.block_size), 0)
    width = int(num_read.max(initial=0))
    table = table[:, :width]
    is_bad = (table < 0) | (table >= problem.num_blocks)
    if not np.count_nonzero(is_bad):
        return
    is_bad &= np.arange(width) < num_read[:, None]
    if held_blocks is not None:
        is_bad &= held_blocks[:, :width]
    if np.count_nonzero(is_bad):
        raise bad_block_error(problem, block_tables, *divmod(int(is_bad.argmax()), width))


def bad_block_error(problem: Problem, block_tables: Tensor, sequence: int, column: int) -> ValueError:
    """The error of a block id that names no block, with the value as the caller wrote it."""
    try:
        value = int(block_tables.owner[sequence, column])
    except (TypeError, IndexError, NotImplementedError):  # a DLPack object that can't be indexed
        value = int(as_numpy(block_tables)[sequence, column])
    expected = f"0 to {problem.num_blocks - 1}" if problem.num_blocks else "none at all, the cache has no blocks"
    return ValueError(f"block_tables: got block {value} for sequence {sequence}, column {column}, expected {expected}")


def _capacity(problem: Problem) -> int:
    """Number of key tokens that one sequence's line of block_tables can name."""
    return problem.max_block_num * problem.block_size


def _host_lengths(lengths: Any, name: str, batch: int) -> NDArray[np.int64]:
    """The lengths as int64 [batch], not yet checked apart from values that int64 can't hold."""
    if isinstance(lengths, (list, tuple)):
        source = _listed_lengths(lengths, name)
    elif isinstance(lengths, (bool, int, float, np.generic)):
        raise TypeError(f"{name}: got {type(lengths).__name__}, expected a list or array of {batch} integers")
    elif type(lengths) is np.ndarray and lengths.dtype.kind in "iu":
        source = lengths
    else:
        t = describe(lengths, name)
        if t.device != "cpu":
            raise TypeError(f"{name}: got one on {t.device}, expected host-side lengths (list, NumPy, CPU tensor)")
        if t.dtype not in INTEGER_DTYPES:
            raise TypeError(f"{name}: got dtype {t.dtype}, expected an integer dtype")
        source = t.owner.numpy() if t.kind == "torch" else as_numpy(t)
    if source.shape != (batch,):
        raise ValueError(f"{name}: got shape {source.shape}, expected ({batch},), one per row of block_tables")
    if source.dtype == np.uint64 and np.any(source > INT32_MAX):
        b = int((source > INT32_MAX).argmax())
        raise _length_error(name, source[b], b)
    return source.astype(np.int64)


def _listed_lengths(lengths: list[Any] | tuple[Any, ...], name: str) -> NDArray[Any]:
    if set(map(type, lengths)) - {int}:
        lengths = [_length(value, name, b) for b, value in enumerate(lengths)]
    try:
        return np.array(lengths, np.int64)
    except OverflowError:
        b, value = next((b, v) for b, v in enumerate(lengths) if not 0 <= v <= INT32_MAX)
        raise _length_error(name, value, b) from None


def _length(value: Any, name: str, sequence: int) -> int:
    dtype = str(getattr(value, "dtype", type(value).__name__))
    if "bool" not in dtype:
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}: got {dtype} for sequence {sequence}, expected an integer")


def _length_error(name: str, value: Any, sequence: int) -> ValueError:
    return ValueError(f"{name}: got {value} for sequence {sequence}, expected 0 to {INT32_MAX}")


def _check_each_length(problem: Problem, q_len: NDArray[np.int64], kv_len: NDArray[np.int64], limit: int) -> None:
    """Raise for the first length that is out of bounds; sequences without query tokens have no
    upper bound."""
    is_read = q_len > 0
    for name, lengths in (("seq_len", q_len), ("kv_seq_len", kv_len)):
        is_bad = (lengths < 0) | ((lengths > INT32_MAX) & is_read)
        if is_bad.any():
            b = int(is_bad.argmax())
            raise _length_error(name, lengths[b], b)
    is_bad = is_read & ((kv_len < q_len) | (kv_len > limit))
    if not is_bad.any():
        return
    b = int(is_bad.argmax())
    q, kv, capacity = int(q_len[b]), int(kv_len[b]), _capacity(problem)
    if kv < q:
        raise ValueError(f"kv_seq_len: got {kv} for sequence {b}, expected at least its seq_len {q}")
    if kv > capacity:
        blocks = f"{problem.max_block_num} blocks of {problem.block_size} in its row of block_tables"
        raise ValueError(f"kv_seq_len: got {kv} for sequence {b}, expected at most {capacity} ({blocks})")
    raise ValueError(f"mask: got maskLen {problem.mask_len}, expected at least {kv} (kv_seq_len of sequence {b})")
