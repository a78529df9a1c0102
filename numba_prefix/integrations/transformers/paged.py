"""Continuous batching: new keys are written into transformers' paged cache, which is read through
its block tables."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from numba_prefix.integrations.transformers.refusals import check_heads, refuse
from numba_prefix.integrations.transformers.runs import Batch

# The keyword argument that carries the cache to a layer's attention function.
PAGED_CACHE = "numba_prefix_paged_cache"
_BATCHES = "_numba_prefix_batches"
_FULL = "full_attention"


@dataclass(slots=True, eq=False)
class LayerCache:
    """One layer's paged cache, [num_blocks, block_size, kv_head_num, head_size], the sequences of
    the forward pass, and the keys and values that were written for it."""

    key: Tensor
    value: Tensor
    batch: Batch
    new: tuple[Tensor, Tensor]


@torch.compiler.disable
def update(cache: Any, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Replacement of PagedAttentionCache.update: writes the new keys and values, gathers none, and
    adds a LayerCache to kwargs.

    key, value [1, kv_head_num, num_tokens, head_size], returned unchanged.
    """
    allocator = cache.layer_to_allocator[layer_idx]
    if allocator.layer_type != _FULL:
        raise refuse(f"a cache for {allocator.layer_type} (a sliding window)")
    key_blocks, value_blocks = allocator.get_cache_for_block_table(layer_idx)
    for name, t, blocks in (("keys", key, key_blocks), ("values", value, value_blocks)):
        heads, head_size = blocks.shape[2:]
        if (t.shape[1], t.shape[3]) != (heads, head_size):
            raise refuse(
                f"{name} of {t.shape[1]} heads of head size {t.shape[3]} for a paged cache of {heads} of {head_size}"
            )
    write_index = kwargs["write_index"][allocator.index]
    nothing = write_index[:0]
    allocator.update(key[0].transpose(0, 1), value[0].transpose(0, 1), layer_idx, nothing, write_index)
    kwargs[PAGED_CACHE] = LayerCache(key_blocks, value_blocks, _batch(cache, allocator, kwargs), (key, value))
    return key, value


@torch.compiler.disable
def attend_paged(query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, qk_scale: float) -> Tensor:
    """Attention over a paged cache. query [1, head_num, num_tokens, head_size], packed; key, value
    as update returned them; tokens beyond the sequences' (padding) give 0."""
    for name, t, written in (("keys", key, cache.new[0]), ("values", value, cache.new[1])):
        if t is not written and (t.shape != written.shape or not torch.equal(t, written)):
            raise refuse(f"{name} that the model changes after they are in the paged cache")
    check_heads(query, cache.key, cache.value)
    tokens = query[0].transpose(0, 1).to(cache.value.dtype)  # autocast may leave them in another
    num_tokens = sum(cache.batch.q_len)
    make = torch.empty if num_tokens == len(tokens) else torch.zeros
    out = make(tokens.shape, dtype=tokens.dtype, device=tokens.device)
    cache.batch.run(tokens[:num_tokens], cache.key, cache.value, out[:num_tokens], qk_scale)
    return out[None]


def _batch(cache: Any, allocator: Any, kwargs: dict[str, Any]) -> Batch:
    """The sequences of this forward pass. Its layers share the list of index tensors, which is new
    at the next pass."""
    pass_id = kwargs["read_index"]
    kept: tuple[Any, dict[int, Batch]] | None = getattr(cache, _BATCHES, None)
    if kept is None or kept[0] is not pass_id:
        kept = (pass_id, {})
        setattr(cache, _BATCHES, kept)
    if allocator.index not in kept[1]:
        kept[1][allocator.index] = _batch_of(allocator, kwargs)
    return kept[1][allocator.index]


def _batch_of(allocator: Any, kwargs: dict[str, Any]) -> Batch:
    q_end = kwargs["cu_seq_lens_q"].tolist()
    kv_end = kwargs["cu_seq_lens_k"][_FULL].tolist()
    q_len = [end - begin for begin, end in pairwise(q_end)]
    kv_len = [end - begin for begin, end in pairwise(kv_end)]
    index = kwargs["read_index"][allocator.index]
    if index.numel() == 0:  # only new prompts: the keys to read are the ones just written
        index = kwargs["write_index"][allocator.index]
    device, index = index.device, index.cpu()
    block_size = allocator.tokens_per_page
    widest = max((-(-n // block_size) for n in kv_len), default=0)
    tables = torch.zeros((len(kv_len), widest), dtype=torch.int32, device="cpu")
    for row, begin, end in zip(tables, kv_end, kv_end[1:], strict=False):
        # A sequence's slots, block after block: every block_size-th one begins a block.
        slots = index[begin:end:block_size]
        row[: len(slots)] = slots // block_size
    return Batch(tables.to(device), q_len, kv_len)
