"""Errors for everything that the operator does not compute: no network gets another attention
silently."""

from __future__ import annotations

from typing import Any

# Keyword arguments of attention functions that change the result, and their names in an error.
_UNSUPPORTED = {
    "sliding_window": "a sliding window",
    "softcap": "a soft cap of the scores",
    "s_aux": "attention sinks",
    "position_bias": "a learned position bias",
    "head_mask": "a head mask",
    "output_attentions": "the output of attention weights",
}


def refuse(what: str) -> ValueError:
    return ValueError(
        f"attn_implementation: got 'numba_prefix' with {what}, which it does not compute; expected 'eager' or 'sdpa' for that"
    )


def check_options(module: Any, dropout: float, is_causal: bool | None, options: dict[str, Any]) -> None:
    """Raise ValueError for anything asked of an attention function beside causal attention."""
    for name, what in _UNSUPPORTED.items():
        if options.get(name) is not None and options[name] is not False:
            raise refuse(what)
    if getattr(module, "sinks", None) is not None:
        raise refuse("attention sinks")
    if dropout:
        raise refuse(f"dropout of {dropout}")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal:
        raise refuse("attention that is not causal")
