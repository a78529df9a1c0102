"""Attention over contiguous caches, which are read in place, viewed as blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from numba_prefix.integrations.transformers.refusals import refuse
from numba_prefix.integrations.transformers.runs import Batch
from numba_prefix.integrations.transformers.spans import Spans, spans_of, unpadded_spans

MAX_BLOCKS = 2**31 - 1  # block ids are int32


def attend_contiguous(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, qk_scale: float, slopes: Tensor | None = None
) -> Tensor:
    """Attention of one layer.

    query [batch, head_num, q_length, head_size]; key, value [batch, kv_head_num, kv_length,
    head_size]; lengths as Spans.tensor makes them, or None without padding and cache; slopes
    float32 [head_num] for linear ALiBi. Returns [batch, q_length, head_num, head_size]; padding
    gives 0.
    """
    batch, heads, q_length, head_size = query.shape
    spans = unpadded_spans(batch, q_length, 0) if lengths is None else spans_of(lengths)
    _check_sizes(query, key, spans, lengths is None)
    key, value = _same_spacing(key, value, spans)
    # Layers may differ in the spacing, which the tables depend on.
    spacing = (_slots_apart(key) or 0) if _is_padded(spans) else 0
    if spacing not in spans.batches:
        spans.batches[spacing] = Batch(_tables(key, spans), spans.q_len, spans.kv_len)
    layer_batch = spans.batches[spacing]
    key, value = _as_blocks(key, spans), _as_blocks(value, spans)
    tokens = query.transpose(1, 2)
    if min(spans.q_len, default=0) == q_length:
        out = torch.empty((batch * q_length, heads, head_size), dtype=query.dtype, device=query.device)
        layer_batch.run(tokens.reshape(out.shape), key, value, out, qk_scale, slopes)
    else:
        rows = spans.indices(query.device)
        packed = tokens[rows]
        out = torch.zeros((batch, q_length, heads, head_size), dtype=query.dtype, device=query.device)
        packed_out = torch.empty_like(packed)
        layer_batch.run(packed, key, value, packed_out, qk_scale, slopes)
        out[rows] = packed_out
    return out.view(batch, q_length, heads, head_size)


def _check_sizes(query: Tensor, key: Tensor, spans: Spans, is_alone: bool) -> None:
    """Raise ValueError for lengths that belong to other queries or keys."""
    batch, _, q_length, _ = query.shape
    if is_alone and key.shape[2] != q_length:
        raise refuse("a cache and no mask")
    last_key = max((first + n for first, n in zip(spans.first_key, spans.kv_len, strict=True)), default=0)
    if (batch, q_length) != (len(spans.q_len), spans.q_length) or len(key) != batch or last_key > key.shape[2]:
        raise refuse(
            f"a mask for {len(spans.q_len)} sequences of {spans.q_length} new tokens and {last_key} in all, "
            f"given {batch} of {q_length} and {key.shape[2]} keys"
        )


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
    """Block tables, on the device of the keys."""
    apart = (_slots_apart(key) or 0) if _is_padded(spans) else 1
    num_blocks = (len(key) - 1) * apart + key.shape[2]
    if num_blocks > MAX_BLOCKS:
        raise refuse(f"a padded cache of {num_blocks} slots (more than {MAX_BLOCKS})")
    sequences = torch.arange(len(key), dtype=torch.int32, device=key.device)
    if not _is_padded(spans):
        return sequences[:, None]
    begin = torch.tensor(spans.first_key, dtype=torch.int32, device=key.device) + sequences * apart
    return begin[:, None] + torch.arange(key.shape[2], dtype=torch.int32, device=key.device)
