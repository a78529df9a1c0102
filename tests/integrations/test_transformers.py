"""Attention of transformers models: the tokens and logits of `eager`, plans shared by layers,
nothing gathered, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
integration = pytest.importorskip("numba_prefix.integrations.transformers")
from networks import NUM_LAYERS, batch_generated, generated, model_of, padded, prompts  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    integration.register()
    integration.register()
    yield
    integration.unregister()


# --- agreement


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "bloom", "mpt"])
@pytest.mark.parametrize("lengths", [(23,), (17, 17), (5, 40, 1, 19)], ids=["alone", "equal", "padded"])
def test_same_tokens_and_logits_as_eager(kind: str, lengths: tuple[int, ...]) -> None:
    model = model_of(kind)
    inputs = padded(prompts(*lengths))
    expected = generated(model, "eager", inputs)
    before = integration.counts()
    assert torch.equal(generated(model, "numba_prefix", inputs), expected)
    after = integration.counts()
    passes = expected.shape[1] - inputs["input_ids"].shape[1]
    assert (after.plans - before.plans, after.runs - before.runs) == (passes, passes * NUM_LAYERS)
    logits = {}
    for implementation in ("eager", "numba_prefix"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()]
    assert torch.isfinite(logits["numba_prefix"]).all()
    torch.testing.assert_close(logits["numba_prefix"], logits["eager"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_padding_on_the_right(kind: str) -> None:
    model = model_of(kind)
    inputs = padded(prompts(5, 40, 1, 19), "right")
    logits = {}
    for implementation in ("eager", "numba_prefix"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(**inputs).logits[inputs["attention_mask"].bool()]
    torch.testing.assert_close(logits["numba_prefix"], logits["eager"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mpt"])
def test_chunks_of_a_prompt(kind: str) -> None:
    """More than one query per pass after a prefix in the cache."""
    model = model_of(kind)
    tokens = torch.tensor(prompts(60))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(tokens).logits
        model.set_attn_implementation("numba_prefix")
        cache, parts = transformers.DynamicCache(config=model.config), []
        for begin, end in ((0, 21), (21, 22), (22, 60)):
            parts.append(model(tokens[:, begin:end], cache=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


def test_layers_with_different_caches_share_a_mask() -> None:
    """Padded sequences, kv heads that differ from layer to layer, keys that are no cache: each is
    addressed its own way."""
    from numba_prefix.integrations.transformers.attention import attend
    from numba_prefix.integrations.transformers.mask import lengths_mask

    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    mask = lengths_mask(2, 6, 6, attention_mask=padding)
    for kv_heads in (1, 2, 4, 2):
        q, k, v = (torch.randn(2, n, 6, 16) for n in (4, kv_heads, kv_heads))
        expected = attend(q, k, v, lengths_mask(2, 6, 6, attention_mask=padding), 0.25)
        assert torch.equal(attend(q, k, v, mask, 0.25), expected)
        visible = padding.bool()[:, None, None] & torch.ones(6, 6).tril().bool()
        eager = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(expected[padding.bool()], eager.transpose(1, 2)[padding.bool()])


@pytest.mark.parametrize("lengths", [(23,), (5, 40, 19)], ids=["alone", "padded"])
def test_static_cache(lengths: tuple[int, ...]) -> None:
    """Keys that are longer than what they hold."""
    model = model_of("llama")
    inputs = padded(prompts(*lengths))
    expected = generated(model, "eager", inputs)
    assert torch.equal(generated(model, "numba_prefix", inputs, cache_implementation="static"), expected)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_continuous_batching(kind: str) -> None:
    """Chunked prefill (64 tokens a batch), decode of all at once, ends at different times."""
    model = model_of(kind)
    inputs = prompts(90, 3, 40, 8, 1, 17)
    assert batch_generated(model, "numba_prefix", inputs) == batch_generated(model, "eager", inputs)


def test_shared_prefix_is_computed_once() -> None:
    model = model_of("llama")
    shared = prompts(64)[0]
    inputs = [shared + [2 + i, 50, 60 + i] for i in range(4)]
    expected = batch_generated(model, "eager", inputs, max_batch_tokens=68)
    before = integration.counts()
    assert batch_generated(model, "numba_prefix", inputs, max_batch_tokens=68) == expected
    computed = integration.counts().query_tokens - before.query_tokens
    decoded = sum(len(tokens) - 1 for tokens in expected)
    assert computed - decoded < sum(map(len, inputs)) - len(shared)


# --- in place


@pytest.fixture
def keys_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of the keys of every run."""
    from numba_prefix.cpu import target

    seen: list[int] = []
    bind = target.bind

    def recorded(plan: Any, operands: Any, *rest: Any) -> Any:
        seen.append(operands.k_cache.address)
        return bind(plan, operands, *rest)

    monkeypatch.setattr(target, "bind", recorded)
    return seen


def test_the_contiguous_cache_is_not_copied(keys_read: list[int]) -> None:
    model = model_of("llama")
    model.set_attn_implementation("numba_prefix")
    cache = transformers.DynamicCache(config=model.config)
    inputs = padded(prompts(5, 40, 19))
    with torch.no_grad():
        model(**inputs, cache=cache)
    assert keys_read[-NUM_LAYERS:] == [layer.keys.data_ptr() for layer in cache.layers]


def test_the_paged_cache_is_not_gathered(keys_read: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[Any] = []
    cls = transformers.generation.continuous_batching.cache.PagedAttentionCache
    create = cls.__init__
    monkeypatch.setattr(cls, "__init__", lambda self, *a, **k: (caches.append(self), create(self, *a, **k))[1])
    monkeypatch.setattr(torch, "index_select", lambda *a: pytest.fail("gathered"))
    model = model_of("llama")
    before = integration.counts()
    tokens = batch_generated(model, "numba_prefix", prompts(30, 9))
    after = integration.counts()
    begin = caches[0].cache_tensor.data_ptr()
    assert keys_read
    assert all(begin <= address < begin + caches[0].cache_tensor.nbytes for address in keys_read)
    assert (after.runs - before.runs) == NUM_LAYERS * (after.plans - before.plans)
    assert after.plans - before.plans <= max(map(len, tokens)) + 1


# --- refusals


def refused(what: str, model: Any, **inputs: Any) -> None:
    model.set_attn_implementation("numba_prefix")
    with pytest.raises(ValueError, match=f"attn_implementation: got 'numba_prefix' with .*{what}"):
        model(**({"input_ids": torch.tensor(prompts(9))} | inputs))


@torch.no_grad()
def test_what_is_not_computed_is_refused_by_name() -> None:
    llama = model_of("llama")
    refused("sliding window", model_of("mistral", sliding_window=4))
    refused("(soft cap|sliding window)", model_of("gemma2"))
    refused("mask of the caller's own", llama, attention_mask=torch.zeros(1, 1, 9, 9))
    refused("padding mask with gaps", llama, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1]]))
    refused("packed sequences", llama, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False)
    refused("attention weights", llama, output_attentions=True)
    refused("attention weights", model_of("bloom"), output_attentions=True)
    refused("slow_but_exact", model_of("bloom", pretraining_tp=2, slow_but_exact=True))
    refused("dropout", model_of("llama", attention_dropout=0.5).train())
    refused("dropout", model_of("bloom", attention_dropout=0.5).train())


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("a sliding window", {"sliding_window": 128}),
        ("a soft cap", {"softcap": 30.0}),
        ("attention sinks", {"s_aux": torch.zeros(4)}),
        ("a learned position bias", {"position_bias": torch.zeros(1, 4, 5, 5)}),
        ("a head mask", {"head_mask": torch.ones(4)}),
        ("attention weights", {"output_attentions": True}),
        ("attention that is not causal", {"is_causal": False}),
        ("dropout of 0.1", {"dropout": 0.1}),
    ],
)
def test_options_of_other_attention_functions(what: str, options: dict[str, Any]) -> None:
    from numba_prefix.integrations.transformers.attention import attention

    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    module = torch.nn.Module()
    assert attention(module, q, k, k, None, sliding_window=None, output_attentions=False)[0].shape == (1, 5, 4, 16)
    with pytest.raises(ValueError, match=what):
        attention(module, q, k, k, None, **options)
    module.sinks = torch.zeros(4)
    with pytest.raises(ValueError, match="sinks"):
        attention(module, q, k, k, None)


def test_a_window_is_refused_in_continuous_batching() -> None:
    model = model_of("mistral", sliding_window=8)
    model.set_attn_implementation("numba_prefix")
    outputs = model.generate_batch(
        inputs=prompts(20),
        generation_config=transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=96),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=8, num_blocks=24, max_batch_tokens=32
        ),
    )
    assert all("sliding" in output.error for output in outputs.values())


def test_a_model_with_an_attention_of_its_own_cannot_misread_the_mask() -> None:
    """It would have added the lengths to its scores."""
    from numba_prefix.integrations.transformers.mask import lengths_mask

    mask = lengths_mask(2, 5, 5)
    assert (mask.ndim, mask.shape, mask.device) == (4, (2, 1, 5, 5), torch.device("cpu"))
    assert mask.to(torch.bool) is mask
    scores = torch.zeros(2, 4, 5, 5)
    for compute in (
        lambda: scores + mask,
        lambda: scores.masked_fill(mask, 0.0),
        lambda: torch.where(mask, scores, scores),
        lambda: mask[:, :, :, :3],
        lambda: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=mask),
    ):
        with pytest.raises(ValueError, match="a model that computes its attention by itself"):
            compute()


def test_in_a_compiled_model() -> None:
    model = model_of("llama")
    model.set_attn_implementation("numba_prefix")
    inputs = padded(prompts(5, 12))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(**inputs).logits, model(**inputs).logits)


def test_gradients_are_refused() -> None:
    model = model_of("llama")
    model.set_attn_implementation("numba_prefix")
    with pytest.raises(ValueError, match="requires grad"):
        model(torch.tensor(prompts(9)))


# --- registration


def test_unregistering_restores_everything() -> None:
    from transformers.models.bloom.modeling_bloom import BloomAttention

    wrapped = BloomAttention.forward
    integration.unregister()
    try:
        assert BloomAttention.forward is wrapped.__wrapped__
        assert "numba_prefix" not in transformers.AttentionInterface()
        with pytest.raises(ValueError, match="numba_prefix"):
            model_of("llama").set_attn_implementation("numba_prefix")
    finally:
        integration.register()


def test_other_implementations_are_as_before() -> None:
    """The wrapped methods do what they did."""
    inputs = padded(prompts(5, 12))
    for kind in ("llama", "bloom"):
        model = model_of(kind)
        before = integration.counts()
        wrapped = generated(model, "eager", inputs)
        integration.unregister()
        try:
            assert torch.equal(generated(model, "eager", inputs), wrapped)
        finally:
            integration.register()
        assert integration.counts() == before
