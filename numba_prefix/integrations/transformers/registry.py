"""Registration of attn_implementation="numba_prefix" with transformers, and its removal."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

from numba_prefix.integrations.transformers.refusals import refuse

NAME = "numba_prefix"

_lock = threading.Lock()
# (class, method, the original; None where it was inherited)
_replaced: list[tuple[type, str, Any]] = []
# Models whose attention does not use transformers' interface, but is wrapped here.
_WRAPPED_MODELS = ("transformers.models.bloom.modeling_bloom", "transformers.models.mpt.modeling_mpt")


def register() -> None:
    """Make attn_implementation="numba_prefix" valid for transformers' models in this process; a
    second call does nothing.

    Adds an attention and a mask function to transformers' tables, and wraps methods that no table
    covers: PagedAttentionCache.update and ContinuousBatchingManager.switch_to_cb_friendly_attn
    (continuous batching), BloomAttention.forward, MptAttention.forward, and the two methods of all
    models by which they take an attn_implementation. For any other attn_implementation the wrapped
    methods do what they did. Raises ImportError without transformers 5.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.models.bloom.modeling_bloom import BloomAttention, BloomPreTrainedModel
    from transformers.models.mpt.modeling_mpt import MptAttention, MptPreTrainedModel

    from numba_prefix.integrations.transformers.alibi import bloom_forward, mpt_forward
    from numba_prefix.integrations.transformers.attention import attention
    from numba_prefix.integrations.transformers.mask import lengths_mask

    with _lock:
        if _replaced:
            return
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, lengths_mask)
        _wrap(PagedAttentionCache, "update", _update)
        _wrap(ContinuousBatchingManager, "switch_to_cb_friendly_attn", _switch)
        _wrap(BloomAttention, "forward", bloom_forward)
        _wrap(MptAttention, "forward", mpt_forward)
        _wrap(PreTrainedModel, "_check_and_adjust_attn_implementation", _check)
        _wrap(PreTrainedModel, "set_attn_implementation", _check)
        for model in (BloomPreTrainedModel, MptPreTrainedModel):
            _wrap(model, "set_attn_implementation", _set)


def unregister() -> None:
    """Undo register(): models that use numba_prefix then raise."""
    from transformers import AttentionInterface, AttentionMaskInterface

    with _lock:
        while _replaced:
            owner, method, original = _replaced.pop()
            if original is None:
                delattr(owner, method)
            else:
                setattr(owner, method, original)
        AttentionInterface._global_mapping.pop(NAME, None)
        AttentionMaskInterface._global_mapping.pop(NAME, None)


def _wrap(owner: type, method: str, wrapper: Callable[[Any], Any]) -> None:
    _replaced.append((owner, method, vars(owner).get(method)))
    setattr(owner, method, wrapper(getattr(owner, method)))


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        if self.config._attn_implementation != NAME:
            return original(self, key_states, value_states, layer_idx, kwargs)
        from numba_prefix.integrations.transformers import paged

        return paged.update(self, key_states, value_states, layer_idx, kwargs)

    return update


def _switch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the chosen implementation: the manager recognises those that can do continuous batching
    by their names."""

    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        if model.config._attn_implementation != NAME:
            return original(self, model, *arguments, **options)
        return None

    return switch_to_cb_friendly_attn


def _check(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse models that compute their attention by themselves, before they look the name up in
    tables of their own or keep what they had."""

    @functools.wraps(original)
    def check(self: Any, attn_implementation: Any, *arguments: Any, **options: Any) -> Any:
        cls: Any = type(self)
        if attn_implementation == NAME and _has_own_attention(cls):
            raise refuse(f"{type(self).__name__}, a model that computes its attention by itself")
        return original(self, attn_implementation, *arguments, **options)

    return check


@functools.cache
def _has_own_attention(cls: Any) -> bool:
    """True for a language model that does not use transformers' interface, and for any model that
    chooses its attention from a table of its own. Others (towers for images, …) may be parts of a
    model that works."""
    if cls.__module__ in _WRAPPED_MODELS or cls._can_set_attn_implementation():
        return False
    try:
        source = inspect.getsource(sys.modules[cls.__module__])
    except (KeyError, OSError, TypeError):  # unknown, as for transformers
        return False
    return cls.can_generate() or "create_causal_mask(" in source or "_ATTENTION_CLASSES[" in source


def _set(original: Callable[..., Any]) -> Callable[..., Any]:
    """Set the implementation although the model does not use transformers' interface: transformers
    searches the model's source for it, and sets nothing where it is missing."""

    @functools.wraps(original)
    def set_attn_implementation(self: Any, attn_implementation: Any, *arguments: Any, **options: Any) -> Any:
        if NAME not in (attn_implementation, self.config._attn_implementation):
            return original(self, attn_implementation, *arguments, **options)
        chosen = self._check_and_adjust_attn_implementation(attn_implementation, is_init_check=False)
        self.config._attn_implementation_internal = chosen
        return None

    return set_attn_implementation
