"""The attention function of a model's layers: contiguous caches seen as pages, or pages as continuous batching has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from numba_prefix.integrations.transformers.mask import LengthsMask, Rows, all_rows
from numba_prefix.integrations.transformers.paged import PAGES, Pages
from numba_prefix.integrations.transformers.refusals import check_options, refuse
from numba_prefix.integrations.transformers.runs import Batch


@torch.compiler.disable  # a compiled model calls it as it is: plans and rows of padding are Python's matter
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
    """transformers' attention interface.

    query [batch, head_num, q_length, head_size]; key, value [batch, kv_head_num, kv_length, head_size]; attention_mask from
    lengths_mask, or None without a cache. Returns [batch, q_length, head_num, head_size]; rows of padding are 0.
    """
    check_options(module, dropout, is_causal, options)
    qk_scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    pages = options.get(PAGES)
    if pages is not None:
        return attend_to_pages(query, pages, qk_scale), None
    return attend(query, key, value, attention_mask, qk_scale), None


@torch.compiler.disable
def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, qk_scale: float, slopes: Tensor | None = None
) -> Tensor:
    """Shapes as in attention; slopes float32 [head_num] for linear ALiBi."""
    batch, heads, q_length, head_size = query.shape
    if mask is None:
        if key.shape[2] != q_length:
            raise refuse("a cache and no mask")
        mask = LengthsMask(all_rows(batch, q_length, 0), q_length, q_length, query.device)
    elif not isinstance(mask, LengthsMask):
        raise refuse("a mask of the caller's own")
    key, value = _same_spacing(key, value, mask.rows)
    spacing = (_slots_apart(key) or 0) if _is_padded(mask.rows) else 0  # layers may differ in it: tables hold it
    if spacing not in mask.batches:
        mask.batches[spacing] = Batch(_tables(key, mask.rows), mask.rows.q_len, mask.rows.kv_len)
    layer_batch = mask.batches[spacing]
    key, value = _pages(key, mask.rows), _pages(value, mask.rows)
    tokens = query.transpose(1, 2)
    if min(mask.rows.q_len, default=0) == q_length:
        out = torch.empty((batch * q_length, heads, head_size), dtype=query.dtype, device=query.device)
        layer_batch.run(tokens.reshape(out.shape), key, value, out, qk_scale, slopes)
    else:
        rows = mask.rows.indices(q_length)
        packed = tokens[rows]
        out = torch.zeros((batch, q_length, heads, head_size), dtype=query.dtype, device=query.device)
        packed_out = torch.empty_like(packed)
        layer_batch.run(packed, key, value, packed_out, qk_scale, slopes)
        out[rows] = packed_out
    return out.view(batch, q_length, heads, head_size)


def attend_to_pages(query: Tensor, pages: Pages, qk_scale: float) -> Tensor:
    """query [1, head_num, num_tokens, head_size], packed; tokens beyond the sequences' (padding) give 0."""
    tokens = query[0].transpose(0, 1)
    num_tokens = sum(pages.batch.q_len)
    make = torch.empty if num_tokens == len(tokens) else torch.zeros
    out = make(tokens.shape, dtype=query.dtype, device=query.device)
    pages.batch.run(tokens[:num_tokens], pages.key, pages.value, out[:num_tokens], qk_scale)
    return out[None]


def _is_padded(rows: Rows) -> bool:
    return any(rows.first_key)


def _slots_apart(t: Tensor) -> int | None:
    """Key slots from one sequence's first to the next one's, or None if that is no whole number."""
    apart, rest = divmod(t.stride(0), t.stride(2)) if t.stride(2) > 0 else (0, 1)
    return None if rest else apart


def _same_spacing(key: Tensor, value: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Keys and values that one block table can address: copied where padding begins inside and they lie differently."""
    if not _is_padded(rows) or (len(key) == 1 or _slots_apart(key) == _slots_apart(value) is not None):
        return key, value
    return key.contiguous(), value.contiguous()


def _pages(t: Tensor, rows: Rows) -> Tensor:
    """[num_blocks, block_size, kv_head_num, head_size] over a contiguous cache [batch, kv_head_num, kv_length, head_size].

    A page is a sequence's whole cache; where padding precedes the tokens, it is one slot, so that a sequence may begin
    anywhere.
    """
    if not _is_padded(rows):
        return t.transpose(1, 2)
    batch, heads, kv_length, head_size = t.shape
    num_slots = (batch - 1) * (_slots_apart(t) or 0) + kv_length
    slot = t.stride(2)
    return t.as_strided((num_slots, 1, heads, head_size), (slot, slot, t.stride(1), t.stride(3)))


def _tables(key: Tensor, rows: Rows) -> Tensor:
    if not _is_padded(rows):
        return torch.arange(len(key), dtype=torch.int32)[:, None]
    begin = torch.tensor(rows.first_key) + torch.arange(len(key)) * (_slots_apart(key) or 0)
    return (begin[:, None] + torch.arange(key.shape[2])).to(torch.int32)
