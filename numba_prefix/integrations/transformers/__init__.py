"""Attention of transformers models (5.x), plain and continuous batching, computed by numba_prefix.

    from numba_prefix.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="numba_prefix")
    model.generate(…)         # reads the model's contiguous cache in place, as blocks
    model.generate_batch(…)   # reads the paged cache in place, through its block tables

Supported are models that take their attention from transformers' interface (Llama, Qwen, Mistral
without a window, …), BLOOM and MPT (ALiBi). Anything that numba_prefix does not compute (sliding
windows, soft caps, attention sinks, dropout, custom masks, …) raises a ValueError that names it.
"""

from __future__ import annotations

from numba_prefix.integrations.transformers.registry import NAME, register, unregister
from numba_prefix.integrations.transformers.runs import Counts, counts

__all__ = ["NAME", "Counts", "counts", "register", "unregister"]
