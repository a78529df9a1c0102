"""BLOOM and MPT: ALiBi models whose attention layers do not use transformers' interface."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import dropout_add

from numba_prefix.inputs.mask_types import alibi_slopes
from numba_prefix.integrations.transformers.attention import attend
from numba_prefix.integrations.transformers.mask import LengthsMask
from numba_prefix.integrations.transformers.refusals import check_options, refuse


def bloom_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A BloomAttention.forward that computes calls with a LengthsMask; others go to the
    original."""

    @wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(attention_mask, LengthsMask):
            return original(
                self, hidden_states, residual, alibi, attention_mask, layer_past=layer_past, use_cache=use_cache,
                output_attentions=output_attentions, **kwargs,
            )  # fmt: skip
        if self.pretraining_tp > 1 and self.slow_but_exact:
            raise refuse("slow_but_exact")
        dropout = self.attention_dropout.p if self.training else 0.0
        check_options(self, dropout, True, kwargs | {"output_attentions": output_attentions})
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        slopes = _slopes(self.num_heads)
        out = attend(query, key, value, attention_mask, self.inv_norm_factor, slopes)
        projected = self.dense(out.flatten(2))
        return dropout_add(projected, residual, self.hidden_dropout, self.training), None

    return forward


def mpt_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """An MptAttention.forward that computes calls with a LengthsMask; others go to the original."""

    @wraps(original)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_bias: Tensor | None,
        cache: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(attention_mask, LengthsMask):
            return original(self, hidden_states, position_bias, cache=cache, attention_mask=attention_mask, **kwargs)
        check_options(self, self.attn_dropout_p if self.training else 0.0, True, kwargs)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        heads = (self.n_heads, self.head_dim)
        query, key, value = (part.unflatten(2, heads).transpose(1, 2) for part in mixed.chunk(3, dim=2))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        slopes = None if position_bias is None else _slopes_of_bias(position_bias)
        out = attend(query, key, value, attention_mask, float(self.softmax_scale), slopes)
        return self.out_proj(out.flatten(2)), None

    return forward


@torch.compiler.assume_constant_result
def _slopes(heads: int) -> Tensor:
    return _kept_slopes(heads)


@cache
def _kept_slopes(heads: int) -> Tensor:
    return torch.from_numpy(alibi_slopes(heads))


def _slopes_of_bias(bias: Tensor) -> Tensor:
    """Slopes, float32 [head_num], of MPT's bias [head_num, 1, max_seq_len], whose last columns are
    -2·slope, -slope, 0."""
    return (
        -bias[:, 0, -2].float()
        if bias.shape[2] > 1
        else torch.zeros(len(bias), dtype=torch.float32, device=bias.device)
    )
