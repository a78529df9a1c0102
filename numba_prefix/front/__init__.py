"""The door: validate, choose a target, plan, run."""

from numba_prefix.front.encoder import (
    prefix_encoder,
    self_attention_prefix_encoder,
    self_attention_prefix_encoder_get_workspace_size,
)
from numba_prefix.front.operation import Context, Op
from numba_prefix.front.paged import merge_states, reshape_and_cache

__all__ = [
    "Context",
    "Op",
    "merge_states",
    "prefix_encoder",
    "reshape_and_cache",
    "self_attention_prefix_encoder",
    "self_attention_prefix_encoder_get_workspace_size",
]
