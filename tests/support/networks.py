"""Small networks of transformers with random weights, and inputs for them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers

NUM_LAYERS = 3
VOCABULARY = 97
COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 96}
LLAMA = {
    "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.3,
}  # fmt: skip
NEW_TOKENS = 6
BFLOAT16 = {"rtol": 0.05, "atol": 0.15}
REFUSED = "attn_implementation: got 'numba_prefix' with .*"


def model_of(kind: str, **changes: Any) -> Any:
    """A small network with random weights, in float32."""
    torch.manual_seed(0)
    name = kind.capitalize()
    if kind == "bloom":
        options: dict[str, Any] = {"hidden_size": 96, "n_layer": NUM_LAYERS, "n_head": 6, "initializer_range": 0.3}
    elif kind == "mpt":
        options = {"d_model": 96, "n_layers": NUM_LAYERS, "n_heads": 6, "max_seq_len": 128, "initializer_range": 0.3}
    else:
        options = dict(LLAMA)
        if kind == "mistral":
            options["sliding_window"] = None
    config = getattr(transformers, f"{name}Config")(**COMMON, **(options | changes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(2, 95, (n,), generator=generator).tolist() for n in lengths]


def padded(sequences: list[list[int]], side: str = "left") -> dict[str, Any]:
    width = max(map(len, sequences))
    rows, mask = [], []
    for tokens in sequences:
        pad = [0] * (width - len(tokens))
        rows.append(pad + tokens if side == "left" else tokens + pad)
        ones = [1] * len(tokens)
        mask.append(pad + ones if side == "left" else ones + pad)
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def generated(model: Any, implementation: str, inputs: dict[str, Any], **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def batch_generated(model: Any, implementation: str, inputs: list[list[int]], **config: Any) -> list[list[int]]:
    model.set_attn_implementation(implementation)
    options = {"page_size": 8, "num_blocks": 48, "max_batch_tokens": 64, "max_requests_per_batch": 8} | config
    outputs = model.generate_batch(
        inputs=inputs,
        generation_config=transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=96),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**options),
    )
    assert model.config._attn_implementation.removeprefix("paged|") == implementation
    assert all(output.error is None for output in outputs.values())
    return [output.generated_tokens for output in outputs.values()]


def chosen(model: Any) -> Any:
    model.set_attn_implementation("numba_prefix")
    return model


def built(name: str, **options: Any) -> Any:
    """A network of any kind, of the tests' sizes."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def qkv(heads: int = 4, kv_heads: int = 2, tokens: int = 5, head_size: int = 16, batch: int = 1) -> tuple[Any, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(batch, n, tokens, head_size) for n in (heads, kv_heads, kv_heads))


def attended(*tensors: Any, mask: Any = None, module: Any = None, **options: Any) -> Any:
    from numba_prefix.integrations.transformers.attention import attention

    return attention(module or torch.nn.Module(), *tensors, mask, **options)[0]
