"""Public reports of transformers' users as small cases: chunks, caches that go backwards,
continuous batching (N04 to N06), and torch's defaults."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
integration = pytest.importorskip("numba_prefix.integrations.transformers")
from networks import (  # noqa: E402
    NUM_LAYERS,
    attended,
    batch_generated,
    chosen,
    generated,
    model_of,
    padded,
    prompts,
    qkv,
)

pytestmark = pytest.mark.usefixtures("registered")


# --- N04: prefill in chunks


@pytest.mark.parametrize("size", [1, 8, 40, 64])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_n04_chunks_of_padding(size: int, cache: str) -> None:
    """transformers#43082: a prompt of one token, padded to 40, has none at all in its first
    chunks."""
    model = model_of("llama")
    inputs = padded(prompts(5, 40, 1, 19))
    expected = generated(model, "eager", inputs)
    options = {"prefill_chunk_size": size, "cache_implementation": cache}
    assert torch.equal(generated(model, "numba_prefix", inputs, **options), expected)


@torch.no_grad()
def test_n04_rows_of_padding_are_zero() -> None:
    from numba_prefix.integrations.transformers.mask import lengths_mask

    padding = padded([[2] * 5, [2] * 20, [2]])["attention_mask"]
    _, k, v = qkv(tokens=20, batch=3)
    for begin, end in ((0, 8), (8, 16), (16, 20)):
        q = torch.randn(3, 4, end - begin, 16)
        mask = lengths_mask(3, end - begin, end, begin, attention_mask=padding[:, :end])
        out = attended(q, k[:, :, :end], v[:, :, :end], mask=mask)
        tokens = padding[:, begin:end].bool()
        assert (out[~tokens] == 0).all()
        assert (out[tokens] != 0).all()


# --- N05: the cache goes backwards


def test_n05_help_by_prompt_lookup_and_by_another_model() -> None:
    """transformers#30042, #30413: the keys of rejected tokens must not be attended to."""
    model, assistant = model_of("llama"), chosen(model_of("llama"))
    inputs = {"input_ids": torch.tensor([prompts(8)[0] * 6])}
    expected = generated(model, "numba_prefix", inputs)
    assert torch.equal(generated(model, "numba_prefix", inputs, prompt_lookup_num_tokens=3), expected)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in assistant.parameters():
            weights.add_(0.05 * torch.randn_like(weights))
    assert torch.equal(generated(model, "numba_prefix", inputs, assistant_model=assistant), expected)


def test_n05_beams() -> None:
    """transformers#46612."""
    model, inputs = model_of("llama"), padded(prompts(5, 40, 19))
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = generated(model, "eager", inputs, **options)
    assert torch.equal(generated(model, "numba_prefix", inputs, **options), expected)


@torch.no_grad()
def test_n05_a_cropped_cache() -> None:
    model, inputs = chosen(model_of("llama")), padded(prompts(5, 20, 12))
    others = torch.tensor(prompts(4, 4, 4))
    cache = transformers.DynamicCache(config=model.config)
    model(**inputs, cache=cache)
    cache.crop(-4)
    ids = torch.cat([inputs["input_ids"][:, :-4], others], 1)
    for layer in cache.layers:
        assert layer.keys.shape[2] == 16
    logits = model(others, attention_mask=inputs["attention_mask"], cache=cache).logits
    fresh = model(ids, attention_mask=inputs["attention_mask"]).logits[:, -4:]
    torch.testing.assert_close(logits[1:], fresh[1:], rtol=1e-4, atol=1e-4)
    keys = torch.randn(2, 2, 20, 16)[:, :, :16]
    q = torch.randn(2, 4, 16, 16)
    assert torch.equal(attended(q, keys, keys), attended(q, keys.contiguous(), keys.contiguous()))


@torch.no_grad()
def test_n05_a_cache_whose_sequences_are_repeated_and_chosen() -> None:
    model, tokens = chosen(model_of("llama")), torch.tensor(prompts(9, 9))
    cache = transformers.DynamicCache(config=model.config)
    model(tokens[:, :8], cache=cache)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([4, 0]))
    logits = model(tokens[[1, 0], 8:], cache=cache).logits
    torch.testing.assert_close(logits, model(tokens[[1, 0]]).logits[:, 8:], rtol=1e-4, atol=1e-4)


# --- N06: continuous batching


def test_n06_short_of_memory() -> None:
    """transformers PR#43150: requests are evicted and prefilled again."""
    model, inputs = model_of("llama"), prompts(90, 3, 40, 8, 1, 17)
    expected = batch_generated(model, "numba_prefix", inputs)
    assert batch_generated(model, "numba_prefix", inputs, num_blocks=14) == expected
    assert expected == [
        generated(model, "eager", {"input_ids": torch.tensor([tokens])})[0, len(tokens) :].tolist() for tokens in inputs
    ]


def test_n06_forks() -> None:
    """transformers PR#42921: the last block of a prompt is partly full, or full."""
    model, inputs = chosen(model_of("llama")), prompts(13, 16)
    alone = batch_generated(model, "numba_prefix", inputs)
    outputs = model.generate_batch(
        inputs=inputs,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=6, do_sample=True, top_k=1, eos_token_id=96, num_return_sequences=3
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=8, num_blocks=48, max_batch_tokens=64
        ),
    )
    made = sorted(tuple(output.generated_tokens) for output in outputs.values())
    assert all(output.error is None for output in outputs.values())
    assert made == sorted(tuple(tokens) for tokens in alone for _ in range(3))


def test_n06_padded_for_a_compiled_model() -> None:
    """transformers PR#48294: index tensors end in slots for no token, the sequences in empty
    ones."""
    model, inputs = model_of("llama"), prompts(20, 3, 9)
    expected = batch_generated(model, "numba_prefix", inputs)
    torch._dynamo.reset()
    config = transformers.CompileConfig(backend="eager", fullgraph=False)
    before = integration.counts()
    assert batch_generated(model, "numba_prefix", inputs, varlen_compile_config=config) == expected
    after = integration.counts()
    assert after.runs - before.runs == NUM_LAYERS * (after.plans - before.plans) > 0


# --- torch's defaults


@torch.no_grad()
def test_default_device_and_dtype() -> None:
    """Small tensors of ours lie on the CPU, whatever torch's default is."""
    from numba_prefix.integrations.transformers.mask import lengths_mask

    inputs = padded(prompts(5, 40, 19))
    q, k, v = qkv(tokens=40, batch=3)
    expected = attended(q, k, v, mask=lengths_mask(3, 40, 40, attention_mask=inputs["attention_mask"]))
    alone = attended(q, k, v)
    for device, dtype in (("meta", torch.float32), ("cpu", torch.float64)):
        torch.set_default_device(device)
        torch.set_default_dtype(dtype)
        try:
            mask = lengths_mask(3, 40, 40, attention_mask=inputs["attention_mask"])
            assert torch.equal(attended(q, k, v, mask=mask), expected)
            assert torch.equal(attended(q, k, v), alone)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
