"""The lengths that a model passes from its mask function to its attention, disguised as a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from numba_prefix.integrations.transformers.operators import lengths_in_graph
from numba_prefix.integrations.transformers.refusals import refusal, refuse
from numba_prefix.integrations.transformers.spans import padded_spans, unpadded_spans

_NOT_CAUSAL = "a mask that is not plainly causal (a sliding window, chunks, packed sequences, or a function of its own)"


class ComputedMask(ValueError, AttributeError):
    """A model used the lengths as if they were a mask. An AttributeError too, for hasattr."""


class LengthsMask:
    """A mask that is never computed: it carries the lengths, and refuses arithmetic.

    A model whose attention does not come from the interface would add it to its scores; that raises
    an error that names the operation. It is no tensor, but has the attributes that transformers
    reads from a complete mask.
    """

    ndim = 4
    dtype = torch.bool

    def __init__(self, lengths: Tensor, batch: int, q_length: int, kv_length: int, device: Any) -> None:
        self.lengths = lengths  # as Spans.tensor makes it
        self.shape = (batch, 1, q_length, kv_length)
        self.device = device

    def to(self, *arguments: Any, **options: Any) -> LengthsMask:
        """The same mask: models may move or cast theirs."""
        return self

    def __getitem__(self, index: Any) -> Any:
        raise _computed("[…]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols, which a mask need not have
            raise AttributeError(name)
        raise _computed(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        raise _computed(getattr(function, "__name__", str(function)))


def _computed(what: str) -> ComputedMask:
    return ComputedMask(refusal(f"a model that computes its attention by itself (it used {what} on the mask)"))


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
    if torch.jit.is_tracing():
        raise refuse("torch.jit.trace")
    is_plain = None
    if mask_function is not causal_mask_function or options.get("local_size") is not None:
        # A compiled model does not look whether sequences are packed; its mask function then is the
        # one for packed sequences, whatever the positions.
        if not torch.compiler.is_compiling() or options.get("local_size") is not None or options.get("use_vmap"):
            raise refuse(_NOT_CAUSAL)
        is_plain = _is_causal(mask_function, batch_size, q_length, kv_length, q_offset, device)
    if kv_offset:
        raise refuse(f"a cache that has dropped its first {kv_offset} keys")
    if torch.compiler.is_compiling():
        lengths = lengths_in_graph(attention_mask, is_plain, batch_size, q_length, q_offset)
        return LengthsMask(lengths, batch_size, q_length, kv_length, device)
    past = int(q_offset)
    spans = (
        unpadded_spans(batch_size, q_length, past)
        if attention_mask is None
        else padded_spans(attention_mask, batch_size, q_length, past)
    )
    return LengthsMask(spans.tensor(), batch_size, q_length, kv_length, torch.device(device))


def _is_causal(
    function: Callable[..., Any], batch: int, q_length: int, kv_length: int, q_offset: Any, device: Any
) -> Tensor:
    """Whether a mask function of indices lets every query see the keys up to its own, and no
    others: a bool tensor, computed in the graph."""
    sequence = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    q_idx = torch.arange(q_length, device=device)[None, None, :, None] + q_offset
    kv_idx = torch.arange(kv_length, device=device)[None, None, None, :]
    return (function(sequence, head, q_idx, kv_idx) == (kv_idx <= q_idx)).all()
