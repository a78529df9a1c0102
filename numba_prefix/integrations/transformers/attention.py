"""The attention function of a model's layers, over contiguous caches viewed as blocks or over the
paged cache of continuous batching."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from numba_prefix.integrations.transformers.mask import LengthsMask, Spans, unpadded_spans
from numba_prefix.integrations.transformers.paged import PAGED_CACHE, LayerCache
from numba_prefix.integrations.transformers.refusals import check_options, refuse
from numba_prefix.integrations.transformers.runs import Batch


# A compiled model calls it uncompiled: plans and padding are handled in Python.
@torch.compiler.disable
def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface.

    query [batch, head_num, q_length, head_size]; key, value [batch, kv_head_num, kv_length,
    head_size]; attention_mask from lengths_mask, or None without a cache. Returns [batch, q_length,
    head_num, head_size]; padding gives 0.
    """
    check_options(module, dropout, is_causal, options)
    qk_scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer_cache = options.get(PAGED_CACHE)
    if layer_cache is not None:
        return attend_paged(query, layer_cache, qk_scale), None
    return attend(query, key, value, attention_mask, qk_scale), None


@torch.compiler.disable
def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, qk_scale: float, slopes: Tensor | None = None
) -> Tensor:
    """Attention over a contiguous cache. Shapes as in attention; slopes float32 [head_num] for
    linear ALiBi."""
    batch, heads, q_length, head_size = query.shape
    if mask is None:
        if key.shape[2] != q_length:
            raise refuse("a cache and no mask")
        mask = LengthsMask(unpadded_spans(batch, q_length, 0), q_length, q_length, query.device)
    elif not isinstance(mask, LengthsMask):
        raise refuse("a mask of the caller's own")
    key, value = _same_spacing(key, value, mask.spans)
    # Layers may differ in the spacing, which the tables depend on.
    spacing = (_slots_apart(key) or 0) if _is_padded(mask.spans) else 0
    if spacing not in mask.batches:
        mask.batches[spacing] = Batch(_tables(key, mask.spans), mask.spans.q_len, mask.spans.kv_len)
    layer_batch = mask.batches[spacing]
    key, value = _as_blocks(key, mask.spans), _as_blocks(value, mask.spans)
    tokens = query.transpose(1, 2)
    if min(mask.spans.q_len, default=0) == q_length:
        out = torch.empty((batch * q_length, heads, head_size), dtype=query.dtype, device=query.device)
        layer_batch.run(tokens.reshape(out.shape), key, value, out, qk_scale, slopes)
    else:
        rows = mask.spans.indices(q_length)
        packed = tokens[rows]
        out = torch.zeros((batch, q_length, heads, head_size), dtype=query.dtype, device=query.device)
        packed_out = torch.empty_like(packed)
        layer_batch.run(packed, key, value, packed_out, qk_scale, slopes)
        out[rows] = packed_out
    return out.view(batch, q_length, heads, head_size)


def attend_paged(query: Tensor, cache: LayerCache, qk_scale: float) -> Tensor:
    """Attention over a paged cache. query [1, head_num, num_tokens, head_size], packed; tokens
    beyond the sequences' (padding) give 0."""
    tokens = query[0].transpose(0, 1)
    num_tokens = sum(cache.batch.q_len)
    make = torch.empty if num_tokens == len(tokens) else torch.zeros
    out = make(tokens.shape, dtype=query.dtype, device=query.device)
    cache.batch.run(tokens[:num_tokens], cache.key, cache.value, out[:num_tokens], qk_scale)
    return out[None]


def _is_padded(spans: Spans) -> bool:
    return any(spans.first_key)


def _slots_apart(t: Tensor) -> int | None:
    """Slots from one sequence's first key to the next one's, or None if that is no whole number."""
    apart, rest = divmod(t.stride(0), t.stride(2)) if t.stride(2) > 0 else (0, 1)
    return None if rest else apart


def _same_spacing(key: Tensor, value: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """Keys and values that one block table can address: copied if there is padding before the
    tokens and their spacings differ."""
    if not _is_padded(spans) or (len(key) == 1 or _slots_apart(key) == _slots_apart(value) is not None):
        return key, value
    return key.contiguous(), value.contiguous()


def _as_blocks(t: Tensor, spans: Spans) -> Tensor:
    """The view [num_blocks, block_size, kv_head_num, head_size] of a contiguous cache [batch,
    kv_head_num, kv_length, head_size].

    A block is a sequence's whole cache; where padding precedes the tokens, it is one slot, so that
    a sequence may begin anywhere.
    """
    if not _is_padded(spans):
        return t.transpose(1, 2)
    batch, heads, kv_length, head_size = t.shape
    num_slots = (batch - 1) * (_slots_apart(t) or 0) + kv_length
    slot = t.stride(2)
    return t.as_strided((num_slots, 1, heads, head_size), (slot, slot, t.stride(1), t.stride(3)))


def _tables(key: Tensor, spans: Spans) -> Tensor:
    if not _is_padded(spans):
        return torch.arange(len(key), dtype=torch.int32)[:, None]
    begin = torch.tensor(spans.first_key) + torch.arange(len(key)) * (_slots_apart(key) or 0)
    return (begin[:, None] + torch.arange(key.shape[2])).to(torch.int32)
