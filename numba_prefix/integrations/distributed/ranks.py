"""Exchanges between the ranks of a torch.distributed group around a computation: whether it went
well everywhere, and whether all ranks called the same one."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import Tensor, as_numpy, bits, describe
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.inputs.problem import FLOAT_DTYPES, Problem
from numba_prefix.inputs.slopes import described_slopes, slope_values

TEXT_BYTES = 2048  # limit of another rank's error text


class RankError(RuntimeError):
    """Another rank of the group could not do its part; the message names it and has its error."""


class Ranks:
    """One rank's view of its group. All ranks call its public methods, in the same order."""

    def __init__(self, group: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("group: got no process group, expected torch.distributed.init_process_group() before")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: got one without this process, expected a group that it belongs to")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: got {type(group).__name__}, expected a torch.distributed group or None")
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        # NCCL moves only GPU memory, even for a few integers.
        self.device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    def agree(self, prepare: Callable[[], tuple[Any, dict[str, int]]]) -> tuple[Any, list[dict[str, int]]]:
        """Run prepare() on every rank. Returns this rank's result, and the facts of all ranks in
        order: named integers, as many on each.

        An error on one rank is raised on all: the rank's own error, or RankError.
        """
        result: Any = None
        facts: dict[str, int] = {}
        error: Exception | None = None
        try:
            result, facts = prepare()
        except Exception as caught:
            error = caught
        # Every rank sends the same number of integers.
        mine = [int(error is not None), *facts.values(), *[0] * (MAX_FACTS - len(facts))]
        table = self._all_gather(torch.tensor(mine, dtype=torch.int64, device=self.device))
        if any(int(row[0]) for row in table):
            self._raise(error)
        return result, [dict(zip(facts, row[1:].tolist(), strict=False)) for row in table]

    def sum(self, values: Any) -> Any:
        """The sum over the ranks, on each rank; it replaces `values`."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Any) -> Any:
        """The largest over the ranks, on each rank; it replaces `values`. Any number where one of
        them is NaN."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def concatenate(self, part: Any, sizes: Sequence[int]) -> Any:
        """Every rank's [rows, sizes[rank], ...], joined along axis 1 in rank order; same on each
        rank."""
        if part.numel() == 0:
            return part.new_empty((len(part), sum(sizes), *part.shape[2:]))
        # Backends need the same size from all ranks.
        padded = part.new_zeros((len(part), max(sizes), *part.shape[2:]))
        padded[:, : part.shape[1]] = part
        # Every backend can send bytes, whatever dtypes it knows.
        parts = self._all_gather(padded.view(torch.uint8))
        return torch.cat([p.view(part.dtype)[:, :size] for p, size in zip(parts, sizes, strict=True)], 1)

    def _reduce(self, values: Any, op: Any) -> Any:
        if values.numel():
            dist.all_reduce(values, op, group=self.group)
        return values

    def _all_gather(self, mine: Any) -> list[Any]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return parts

    def _raise(self, error: Exception | None) -> None:
        """Raise this rank's error, or that of the first rank that has one."""
        text = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:TEXT_BYTES]
        mine = torch.tensor(list(text.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8, device=self.device)
        texts = self._all_gather(mine)
        if error is not None:
            raise error
        for rank, given in enumerate(texts):
            message = bytes(given.tolist()).rstrip(b"\0").decode(errors="replace")
            if message:
                raise RankError(f"rank {rank}: {message}")


def facts_of(
    problem: Problem, lengths: tuple[NDArray[np.int64], NDArray[np.int64]], mask: Any, slopes: Any, **others: int
) -> dict[str, int]:
    """The integers of a call that ranks compare: what its arguments mean, not how they are given.
    others: further ones."""
    facts = {name: getattr(problem, name) for name in _COUNTS}
    facts["dtype"] = FLOAT_DTYPES.index(problem.dtype)
    facts["mask_type"] = int(problem.mask_type)
    facts["qk_scale"] = struct.unpack("<q", struct.pack("<d", problem.qk_scale))[0]
    facts["seq_len, kv_seq_len"] = _digest(*(x.tobytes() for x in lengths))
    facts["mask"] = facts["slopes"] = 0
    if problem.mask_type.is_alibi:  # else neither has a meaning
        t = None if mask is None else describe(mask, "mask")
        facts["mask"] = 0 if t is None else _digest_of_mask(t)
        if slopes is not None and (t is None or t.ndim != 3):  # a bias for each head is complete
            facts["slopes"] = _digest_of_slopes(slopes)
    return facts | others


def check_equal(facts: list[dict[str, int]], names: Sequence[str]) -> None:
    """Raise ValueError (the same on every rank) for the first named fact that differs from rank 0's
    on some rank."""
    for name in names:
        for rank, given in enumerate(facts):
            if given[name] != facts[0][name]:
                if name in _DIGESTS:
                    raise ValueError(
                        f"{name}: got others on rank {rank} than on rank 0, expected the same on all ranks"
                    )
                show = _SHOWN.get(name, str)
                got, expected = show(given[name]), show(facts[0][name])
                raise ValueError(f"{name}: got {got} on rank {rank}, expected {expected} as on rank 0")


def _digest_of_mask(t: Tensor) -> int:
    """A digest of a template's values, or of the shape of a bias for each head, which is large."""
    if t.ndim >= 3:
        return _digest(repr(t.shape).encode())
    if t.device != "cpu":
        values = torch.as_tensor(t.owner, device="cpu").float().numpy()
    elif t.dtype == "bfloat16":
        values = (bits(t).astype(np.uint32) << 16).view(np.float32)
    else:
        values = as_numpy(t).astype(np.float32)
    return _digest(repr(t.shape).encode(), _bytes(values))


def _digest_of_slopes(slopes: Any) -> int:
    """A digest of the shape and, of what can be slopes at all, the numbers."""
    t = described_slopes(slopes)
    if t.ndim != 1:
        return _digest(repr(t.shape).encode())
    with np.errstate(over="ignore"):
        return _digest(_bytes(np.array(slope_values(t)).astype(np.float32)))


def _bytes(values: NDArray[np.float32]) -> bytes:
    return (values + np.float32(0)).tobytes()  # -0 is 0


def _digest(*parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little", signed=True)


_COUNTS = ("num_tokens", "batch", "head_num", "kv_head_num", "group_size", "head_size", "block_size")
CALLS = ("head_parallel_prefix_encoder", "context_parallel_prefix_encoder")
_DIGESTS = ("seq_len, kv_seq_len", "mask", "slopes")
MAX_FACTS = 24
_SHOWN: dict[str, Callable[[int], str]] = {
    "call": CALLS.__getitem__,
    "dtype": FLOAT_DTYPES.__getitem__,
    "mask_type": lambda number: MaskType(number).name,
    "qk_scale": lambda number: str(struct.unpack("<d", struct.pack("<q", number))[0]),
}
