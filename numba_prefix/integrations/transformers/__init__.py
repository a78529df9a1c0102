"""Attention of transformers models (5.x), plain and continuous batching, computed by numba_prefix.

    from numba_prefix.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="numba_prefix")
    model.generate(…)         # the model's contiguous cache is read as pages, where it is
    model.generate_batch(…)   # the paged cache is read through its block tables, where it is

Models that take their attention from transformers' interface (Llama, Qwen, Mistral without a window, …), BLOOM and MPT
(ALiBi). What numba_prefix does not compute (sliding windows, soft caps, attention sinks, dropout, masks of one's own, …)
raises a ValueError that names it.
"""

from __future__ import annotations

from numba_prefix.integrations.transformers.registry import NAME, register, unregister
from numba_prefix.integrations.transformers.runs import Counts, counts

__all__ = ["NAME", "Counts", "counts", "register", "unregister"]
