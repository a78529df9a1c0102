"""Errors for everything that the operator does not compute: no network gets another attention
silently."""

from __future__ import annotations

import dis
import sys
from typing import Any

import torch
from torch import Tensor

from numba_prefix.inputs.problem import MAX_HEAD_SIZE

# Keyword arguments of attention functions that change the result, and their names in an error;
# any other keyword is refused by its own name.
_KNOWN = {
    "sliding_window": "a sliding window",
    "window_size": "a sliding window",
    "softcap": "a soft cap of the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a learned position bias",
    "head_mask": "a head mask",
    "output_attentions": "the output of attention weights",
    "block_indices": "a choice of key blocks",
    "indices": "a choice of keys",
    "topk_indices": "a choice of keys",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "seq_idx": "packed sequences",
}
# Keywords that reach attention functions and never change what they compute.
_HARMLESS = frozenset(
    ("position_ids", "cache_position", "token_type_ids", "use_cache", "return_dict", "output_hidden_states",
     "output_router_logits", "num_items_in_batch", "max_length_q", "max_length_k", "deterministic")
)  # fmt: skip
# Keywords by which continuous batching describes its sequences, which the paged cache has read.
_OF_CONTINUOUS_BATCHING = frozenset(
    ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index", "block_table", "logits_indices",
     "logits_processor_args")
)  # fmt: skip
# What `eager_attention_forward` of a model may read from its attention module.
_PLAIN_ATTRIBUTES = frozenset(("training", "num_key_value_groups", "head_dim", "scaling", "config", "layer_idx"))
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refuse(what: str) -> ValueError:
    return ValueError(refusal(what))


def refusal(what: str) -> str:
    return (
        f"attn_implementation: got 'numba_prefix' with {what}, which it does not compute; "
        "expected 'eager' or 'sdpa' for that"
    )


def check_options(
    module: Any, dropout: float, is_causal: bool | None, options: dict[str, Any], paged_cache: str = ""
) -> None:
    """Raise ValueError for anything asked of an attention function beside causal attention.

    options: its further keywords. One that is neither harmless nor neutral (None, False, 0) is
    refused by name. paged_cache: the keyword that carries the paged cache of continuous batching.
    """
    is_paged = paged_cache in options
    for name, value in options.items():
        if name in _HARMLESS or name == paged_cache or (is_paged and name in _OF_CONTINUOUS_BATCHING):
            continue
        if not _is_neutral(name, value):
            raise refuse(f"{_KNOWN[name]} ({name})" if name in _KNOWN else f"the keyword {name} ({_kind(value)})")
    for name in _features(type(module)):
        if not _is_neutral(name, getattr(module, name, None)):
            raise refuse(_KNOWN.get(name, f"an attention of its own (it reads {name})"))
    if dropout:
        raise refuse(f"dropout of {dropout}")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal:
        raise refuse("attention that is not causal")


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise ValueError for dtypes and head sizes (the last axis) that the operator does not
    have."""
    for name, t in (("queries", query), ("keys", key), ("values", value)):
        if t.dtype not in _DTYPES:
            raise refuse(f"{name} in {str(t.dtype).removeprefix('torch.')}")
    head_size = key.shape[-1]
    if query.shape[-1] != head_size:
        raise refuse(f"queries of another head size than keys ({query.shape[-1]}, not {head_size})")
    if value.shape[-1] != head_size:
        raise refuse(f"values of another head size than keys ({value.shape[-1]}, not {head_size})")
    if head_size > MAX_HEAD_SIZE:
        raise refuse(f"head size {head_size} (more than {MAX_HEAD_SIZE})")


def _is_neutral(name: str, value: Any) -> bool:
    """True for a value that asks for nothing."""
    if value is None or value is False:
        return True
    if isinstance(value, Tensor):
        return name in ("cu_seq_lens_q", "cu_seq_lens_k") and value.numel() <= 2  # one sequence
    if "window" in name:
        return value in (-1, (-1, -1), [-1, -1])
    if isinstance(value, (int, float)):
        return value == 0
    if isinstance(value, (tuple, list)):
        return all(_is_neutral(name, item) for item in value)
    if isinstance(value, dict):
        return all(_is_neutral(name, item) for item in value.values())
    return False


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)[:60]


@torch.compiler.assume_constant_result
def _features(cls: type) -> tuple[str, ...]:
    """Attributes that the model's own `eager_attention_forward` reads from an attention module of
    this class, beside the plain ones: features that the module has or, where they are None, has
    not."""
    if cls not in _features_of:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        code = getattr(function, "__code__", None)
        read = [] if code is None else [name for name in _read_from_first(code) if name not in _PLAIN_ATTRIBUTES]
        _features_of[cls] = tuple(dict.fromkeys(["sinks", *read]))
    return _features_of[cls]


_features_of: dict[type, tuple[str, ...]] = {}


def _read_from_first(code: Any) -> list[str]:
    """Names of the attributes that a function reads from its first parameter."""
    first, names, last = code.co_varnames[0], [], None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_ATTR" and first == (last[-1] if isinstance(last, tuple) else last):
            names.append(instruction.argval)
        last = instruction.argval
    return names
