"""Public reports of transformers' users as small cases: compiled models (N02)."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")
integration = pytest.importorskip("numba_prefix.integrations.transformers")
from networks import (  # noqa: E402
    NUM_LAYERS,
    REFUSED,
    attended,
    chosen,
    generated,
    model_of,
    padded,
    prompts,
    qkv,
)

pytestmark = pytest.mark.usefixtures("registered")


COMPILED = {
    "alone": {"lengths": (23,), "use_cache": False},
    "equal": {"lengths": (17, 17, 17), "use_cache": False},
    "positions": {"lengths": (23, 23), "use_cache": False, "position_ids": True},
    "cache": {"lengths": (23,)},
    "left": {"lengths": (5, 12, 23), "padding": "left"},
    "right": {"lengths": (5, 12, 23), "padding": "right"},
}


@pytest.mark.parametrize("kind", ["llama", "bloom", "mpt"])
@pytest.mark.parametrize("name", list(COMPILED))
@torch.no_grad()
def test_n02_a_compiled_model_is_one_graph(kind: str, name: str) -> None:
    """transformers PR#42367, PR#41827: a traced model is always masked as if it were packed."""
    if kind != "llama" and name == "positions":
        pytest.skip("ALiBi has no positions")
    options = dict(COMPILED[name])
    inputs = padded(prompts(*options.pop("lengths")), options.pop("padding", "left"))
    tokens = inputs["attention_mask"].bool()
    if "left" not in name and "right" not in name:
        del inputs["attention_mask"]
    if options.pop("position_ids", False):
        inputs["position_ids"] = torch.arange(tokens.shape[1])[None]
    model = model_of(kind)
    expected = model(**inputs, **options).logits[tokens]
    torch._dynamo.reset()
    compiled = torch.compile(chosen(model), backend="eager", fullgraph=True)
    for _ in range(2):
        before = integration.counts()
        logits = compiled(**inputs, **options).logits[tokens]
        after = integration.counts()
        assert (after.plans - before.plans, after.runs - before.runs) == (1, NUM_LAYERS)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, model(**inputs, **options).logits[tokens])


@pytest.mark.parametrize("mode", ["eager", "graphs", "one_graph"])
@torch.no_grad()
def test_n02_packed_sequences_stay_refused(mode: str) -> None:
    model = chosen(model_of("llama"))
    torch._dynamo.reset()
    run = model if mode == "eager" else torch.compile(model, backend="eager", fullgraph=mode == "one_graph")
    tokens = torch.tensor(prompts(9, 9))
    for positions in ([[0, 1, 2, 3, 0, 1, 2, 3, 4]], [list(range(9)), [0, 1, 2, 3, 4, 5, 6, 7, 0]]):
        with pytest.raises(ValueError, match=f"{REFUSED}packed sequences"):
            run(tokens, position_ids=torch.tensor(positions), use_cache=False)
    with pytest.raises(ValueError, match="attention_mask: got a width of 8, expected 9"):
        run(tokens, attention_mask=torch.ones(2, 8, dtype=torch.int64))


@torch.no_grad()
def test_n02_the_bare_decoder() -> None:
    model = chosen(model_of("llama"))
    torch._dynamo.reset()
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    tokens = torch.tensor(prompts(9, 9))
    expected = model.model(tokens, use_cache=False).last_hidden_state
    assert torch.equal(compiled(input_ids=tokens, use_cache=False).last_hidden_state, expected)


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_n02_generation_with_a_compiled_forward(cache: str) -> None:
    model = model_of("llama")
    inputs = padded(prompts(5, 40, 19))
    expected = generated(model, "eager", inputs)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    before = integration.counts().runs
    assert torch.equal(generated(model, "numba_prefix", inputs, cache_implementation=cache), expected)
    assert integration.counts().runs - before >= NUM_LAYERS * 5


def test_n02_what_is_not_computed_is_refused_in_a_compiled_model() -> None:
    torch._dynamo.reset()
    for model, inputs, what in (
        (chosen(model_of("llama")), {"softcap": torch.ones(1)}, "a soft cap"),
        (chosen(model_of("llama")), {"block_indices": torch.ones(1)}, "a choice of key blocks"),
        (chosen(model_of("mistral", sliding_window=4)), {}, "sliding window"),
        (chosen(model_of("llama").double()), {}, "float64"),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match=REFUSED + what):
            torch.compile(model, backend="eager")(torch.tensor(prompts(9)), **inputs)
    with pytest.raises(ValueError, match="requires grad"):
        torch.compile(chosen(model_of("llama")), backend="eager")(torch.tensor(prompts(9)))


@torch.no_grad()
def test_tracing_by_torch_jit_is_refused() -> None:
    """It would record memory that nothing writes."""
    model = chosen(model_of("llama", use_cache=False)).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=f"{REFUSED}torch.jit.trace"):
            torch.jit.trace(lambda ids: model(ids).logits, torch.tensor(prompts(9)), check_trace=False)
        with pytest.raises(ValueError, match=f"{REFUSED}torch.jit.trace"):
            torch.jit.trace(attended, qkv(), check_trace=False)
