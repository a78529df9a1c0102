"""Torch operators that stand in the graph of a compiled model, so that it is one graph: the lengths
of a forward pass, and attention over a contiguous cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from numba_prefix.integrations.transformers.contiguous import attend_contiguous
from numba_prefix.integrations.transformers.refusals import refuse
from numba_prefix.integrations.transformers.spans import padded_spans, unpadded_spans


def _lengths(
    padding_mask: Tensor | None, is_causal: Tensor | None, past: Tensor | None, past_int: int, batch: int, q_length: int
) -> Tensor:
    if is_causal is not None and not is_causal.item():
        raise refuse("a mask that is not plainly causal (packed sequences, or blocks of tokens that see each other)")
    seen = past_int if past is None else int(past)
    if padding_mask is None:
        return unpadded_spans(batch, q_length, seen).tensor()
    return padded_spans(padding_mask, batch, q_length, seen).tensor()


def _fake_lengths(padding_mask: Any, is_causal: Any, past: Any, past_int: int, batch: int, q_length: int) -> Tensor:
    return torch.empty((batch, 5), dtype=torch.int64, device="cpu")


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Any, qk_scale: float, slopes: Any) -> Tensor:
    batch, heads, q_length, head_size = query.shape
    return query.new_empty((batch, q_length, heads, head_size))


def _no_gradient(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError("numba_prefix computes no gradient")


def _refuse_gradient(ctx: Any, inputs: Any, output: Any) -> None:
    """Refuse inputs whose gradient is being recorded: torch calls this for them."""
    raise ValueError("query: got a tensor that requires grad, expected torch.no_grad(): no gradient is computed")


def _operator(name: str, function: Callable[..., Any], fake: Callable[..., Any], schema: str) -> Any:
    # Every pass makes a plan, which a CUDA graph cannot hold.
    tags = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
    operator = torch.library.custom_op(f"numba_prefix::{name}", function, mutates_args=(), schema=schema, **tags)
    operator.register_fake(fake)
    return operator


_operator(
    "transformers_lengths", _lengths, _fake_lengths,
    "(Tensor? padding_mask, Tensor? is_causal, Tensor? past, SymInt past_int, SymInt batch, SymInt q_length) -> Tensor",
)  # fmt: skip
_operator(
    "transformers_attention", attend_contiguous, _fake_attention,
    "(Tensor query, Tensor key, Tensor value, Tensor? lengths, float qk_scale, Tensor? slopes) -> Tensor",
).register_autograd(_no_gradient, setup_context=_refuse_gradient)  # fmt: skip


def lengths_in_graph(
    padding_mask: Tensor | None, is_causal: Tensor | None, batch: int, q_length: int, past: Any
) -> Tensor:
    """The lengths of a forward pass, as Spans.tensor makes them. is_causal: a bool tensor that is
    false where the mask is another than the causal one, which is then refused."""
    operator = torch.ops.numba_prefix.transformers_lengths
    if isinstance(past, Tensor):
        return operator(padding_mask, is_causal, past, 0, batch, q_length)
    return operator(padding_mask, is_causal, None, past, batch, q_length)


def attend_in_graph(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, qk_scale: float, slopes: Tensor | None
) -> Tensor:
    """attend_contiguous, as an operator in the graph."""
    return torch.ops.numba_prefix.transformers_attention(query, key, value, lengths, qk_scale, slopes)
