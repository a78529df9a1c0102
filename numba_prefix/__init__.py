"""Paged-prefix attention (Ascend ATB's SelfAttention PrefixEncoder), compiled by Numba."""

from numba_prefix.front.encoder import (
    prefix_encoder,
    self_attention_prefix_encoder,
    self_attention_prefix_encoder_get_workspace_size,
)
from numba_prefix.front.operation import Context, Op
from numba_prefix.front.paged import merge_states, reshape_and_cache
from numba_prefix.inputs.errors import TargetUnavailableError
from numba_prefix.inputs.mask_types import MaskType, alibi_mask, alibi_slopes
from numba_prefix.reference.oracle import reference
from numba_prefix.runtime.num_threads import get_num_threads, set_num_threads
from numba_prefix.verify.warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "Context",
    "MaskType",
    "Op",
    "TargetUnavailableError",
    "__version__",
    "alibi_mask",
    "alibi_slopes",
    "get_num_threads",
    "merge_states",
    "prefix_encoder",
    "reference",
    "reshape_and_cache",
    "self_attention_prefix_encoder",
    "self_attention_prefix_encoder_get_workspace_size",
    "set_num_threads",
    "warmup",
]
