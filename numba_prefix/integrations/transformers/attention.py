"""The attention function of a model's layers, over contiguous caches or over the paged cache of
continuous batching."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from numba_prefix.integrations.transformers.contiguous import attend_contiguous
from numba_prefix.integrations.transformers.mask import LengthsMask
from numba_prefix.integrations.transformers.operators import attend_in_graph
from numba_prefix.integrations.transformers.paged import PAGED_CACHE, attend_paged
from numba_prefix.integrations.transformers.refusals import check_heads, check_options, refuse


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
    check_options(module, dropout, is_causal, options, PAGED_CACHE)
    qk_scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    layer_cache = options.get(PAGED_CACHE)
    if layer_cache is not None:
        return attend_paged(query, key, value, layer_cache, qk_scale), None
    return attend(query, key, value, attention_mask, qk_scale), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, qk_scale: float, slopes: Tensor | None = None
) -> Tensor:
    """Attention over a contiguous cache. Shapes as in attention; slopes float32 [head_num] for
    linear ALiBi. In a compiled model it is an operator of the graph."""
    if torch.jit.is_tracing():
        raise refuse("torch.jit.trace")
    if mask is not None and not isinstance(mask, LengthsMask):
        raise refuse("a mask of the caller's own")
    check_heads(query, key, value)
    query, key, value = _in_one_dtype(query, key, value)
    compute = attend_in_graph if torch.compiler.is_compiling() else attend_contiguous
    return compute(query, key, value, None if mask is None else mask.lengths, qk_scale, slopes)


def _in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three in autocast's dtype, or without autocast in the values', where they differ: rotary
    embeddings and norms leave float32 behind."""
    if query.dtype == key.dtype == value.dtype:
        return query, key, value
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)
