"""The lengths that a model passes from its mask function to its attention, disguised as a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from numba_prefix.integrations.transformers.refusals import refuse
from numba_prefix.integrations.transformers.runs import Batch


@dataclass(slots=True, eq=False)
class Spans:
    """Places of the tokens of a forward pass in its grids of queries [batch, q_length] and keys
    [batch, kv_length]."""

    q_begin: list[int]  # each sequence's first query that is not padding
    q_len: list[int]
    first_key: list[int]  # first key that is not padding
    kv_len: list[int]  # keys up to the last query

    def indices(self, q_length: int) -> tuple[Tensor, Tensor]:
        """(sequence, query) of every token, int64 [num_tokens] each, in order."""
        where = [
            (b, i)
            for b, (begin, n) in enumerate(zip(self.q_begin, self.q_len, strict=True))
            for i in range(begin, begin + n)
        ]
        both = torch.tensor(where, dtype=torch.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]


class LengthsMask:
    """A mask that is never computed: it carries the lengths, and refuses arithmetic.

    A model whose attention does not come from the interface would add it to its scores; that raises
    an error that names the operation. It is no tensor (torch.compile traces those), but has the
    attributes that transformers reads from a complete mask.
    """

    ndim = 4
    dtype = torch.bool

    def __init__(self, spans: Spans, q_length: int, kv_length: int, device: Any) -> None:
        self.spans = spans
        self.shape = (len(spans.q_len), 1, q_length, kv_length)
        self.device = device
        # By the spacing of a cache; the first layer fills it, the others use it.
        self.batches: dict[int, Batch] = {}

    def to(self, *arguments: Any, **options: Any) -> LengthsMask:
        """The same mask: models may move or cast theirs."""
        return self

    def __getitem__(self, index: Any) -> Any:
        raise _computed("[…]")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        raise _computed(getattr(function, "__name__", str(function)))


def _computed(what: str) -> ValueError:
    return refuse(f"a model that computes its attention by itself (it used {what} on the mask)")


@torch.compiler.disable
def lengths_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    device: Any = "cpu",
    **options: Any,
) -> LengthsMask:
    """The mask function for numba_prefix in transformers' interface: the mask must be causal, its
    padding at the ends of sequences."""
    # Generation with a static cache makes it in advance.
    if isinstance(attention_mask, LengthsMask):
        return attention_mask
    if mask_function is not causal_mask_function or options.get("local_size") is not None:
        raise refuse(
            "a mask that is not plainly causal (a sliding window, chunks, packed sequences, or a function of its own)"
        )
    if kv_offset:
        raise refuse(f"a cache that has dropped its first {kv_offset} keys")
    past = int(q_offset)
    spans = (
        unpadded_spans(batch_size, q_length, past)
        if attention_mask is None
        else _padded_spans(attention_mask, q_length, past)
    )
    return LengthsMask(spans, q_length, kv_length, torch.device(device))


def unpadded_spans(batch: int, q_length: int, past: int) -> Spans:
    zeros = [0] * batch
    return Spans(zeros, [q_length] * batch, zeros, [past + q_length] * batch)


def _padded_spans(padding_mask: Tensor, q_length: int, past: int) -> Spans:
    """Places of the tokens under padding_mask, bool [batch, at least the keys so far], true for
    tokens."""
    is_token = padding_mask.detach().cpu().numpy().astype(bool)[:, : past + q_length]
    count = is_token.sum(axis=1)
    first = np.where(count > 0, is_token.argmax(axis=1), 0)
    end = first + count
    columns = np.arange(is_token.shape[1])
    if not np.array_equal(is_token, (columns >= first[:, None]) & (columns < end[:, None])):
        raise refuse("a padding mask with gaps (tokens, padding, tokens again)")
    begin = np.maximum(first - past, 0)
    q_len = np.maximum(end - past - begin, 0)
    kv_len = np.where(q_len > 0, end - first, 0)
    return Spans(begin.tolist(), q_len.tolist(), first.tolist(), kv_len.tolist())
