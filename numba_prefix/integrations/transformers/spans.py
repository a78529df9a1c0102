"""Places of the tokens of a forward pass, and a small tensor of them for compiled graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numba_prefix.integrations.transformers.refusals import refuse
from numba_prefix.integrations.transformers.runs import Batch

# The attribute by which the tensor keeps what was read from it, for the other layers of the pass.
_READ = "_numba_prefix_spans"


@dataclass(slots=True, eq=False)
class Spans:
    """Places of the tokens of a forward pass in its grids of queries [batch, q_length] and keys
    [batch, kv_length]."""

    q_begin: list[int]  # each sequence's first query that is not padding
    q_len: list[int]
    first_key: list[int]  # first key that is not padding
    kv_len: list[int]  # keys up to the last query
    q_length: int
    # By the spacing of a cache; the first layer fills it, the others use it.
    batches: dict[int, Batch] = field(default_factory=dict)

    def indices(self, device: Any) -> tuple[Tensor, Tensor]:
        """(sequence, query) of every token, int64 [num_tokens] each, in order."""
        where = [
            (b, i)
            for b, (begin, n) in enumerate(zip(self.q_begin, self.q_len, strict=True))
            for i in range(begin, begin + n)
        ]
        both = torch.tensor(where, dtype=torch.int64, device=device).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def tensor(self) -> Tensor:
        """int64 [batch, 5] on the CPU, from which spans_of reads the same spans."""
        columns = zip(self.q_begin, self.q_len, self.first_key, self.kv_len, strict=True)
        rows = [(*row, self.q_length) for row in columns]
        t = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 5)
        setattr(t, _READ, self)
        return t


def spans_of(lengths: Tensor) -> Spans:
    """The spans that a tensor of Spans.tensor carries."""
    spans: Spans | None = getattr(lengths, _READ, None)
    if spans is None:
        q_begin, q_len, first_key, kv_len, q_length = lengths.T.tolist()
        spans = Spans(q_begin, q_len, first_key, kv_len, q_length[0] if q_length else 0)
        setattr(lengths, _READ, spans)
    return spans


def unpadded_spans(batch: int, q_length: int, past: int) -> Spans:
    zeros = [0] * batch
    return Spans(zeros, [q_length] * batch, zeros, [past + q_length] * batch, q_length)


def padded_spans(padding_mask: Tensor, batch: int, q_length: int, past: int) -> Spans:
    """Places of the tokens under padding_mask [batch, at least the keys so far], true for tokens.

    Raises ValueError for a mask of another shape: columns that are missing would be taken for
    padding, and the queries they belong to for nothing.
    """
    width = past + q_length
    shape = tuple(padding_mask.shape)
    if len(shape) != 2 or shape[0] != batch:
        raise ValueError(
            f"attention_mask: got shape {list(shape)}, expected [{batch}, {width}] (sequences, past and new tokens)"
        )
    if shape[1] < width:
        raise ValueError(
            f"attention_mask: got a width of {shape[1]}, expected {width}: {past} past tokens and {q_length} new ones"
        )
    is_token = padding_mask.detach().cpu().numpy().astype(bool)[:, :width]
    count = is_token.sum(axis=1)
    first = np.where(count > 0, is_token.argmax(axis=1) if width else 0, 0)
    end = first + count
    columns = np.arange(width)
    if not np.array_equal(is_token, (columns >= first[:, None]) & (columns < end[:, None])):
        raise refuse("a padding mask with gaps (tokens, padding, tokens again)")
    begin = np.maximum(first - past, 0)
    q_len = np.maximum(end - past - begin, 0)
    kv_len = np.where(q_len > 0, end - first, 0)
    return Spans(begin.tolist(), q_len.tolist(), first.tolist(), kv_len.tolist(), q_length)
