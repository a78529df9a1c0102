"""Public reports of transformers' users as small cases (N01 to N06, N10, N11), what models ask of
attention functions, compiled models, and models on a GPU."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
integration = pytest.importorskip("numba_prefix.integrations.transformers")
torch_gpu = pytest.importorskip("torch_gpu")
from networks import COMMON, NUM_LAYERS, batch_generated, generated, model_of, padded, prompts  # noqa: E402

BFLOAT16 = {"rtol": 0.05, "atol": 0.15}
REFUSED = "attn_implementation: got 'numba_prefix' with .*"


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


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


# --- N10: nothing that changes a result is dropped


@pytest.mark.parametrize(
    ("what", "options"),
    [
        (r"a choice of key blocks \(block_indices\)", {"block_indices": torch.zeros(1, 2, 5, 1, dtype=torch.int64)}),
        (r"a choice of keys \(indices\)", {"indices": torch.zeros(1, 5, 2, dtype=torch.int64)}),
        (r"a choice of keys \(topk_indices\)", {"topk_indices": torch.zeros(1, 5, 2, dtype=torch.int64)}),
        (r"attention sinks \(sinks\)", {"sinks": torch.zeros(4)}),
        (r"attention sinks \(s_aux\)", {"s_aux": torch.zeros(4)}),
        (r"packed sequences \(cu_seq_lens_q\)", {"cu_seq_lens_q": torch.tensor([0, 2, 5])}),
        (r"packed sequences \(seq_idx\)", {"seq_idx": torch.zeros(1, 5, dtype=torch.int32)}),
        (r"a sliding window \(window_size\)", {"window_size": (0, 0)}),
        (r"the keyword relative_bias \(a tensor\)", {"relative_bias": torch.zeros(1)}),
        (r"the keyword biases \(", {"biases": [None, torch.zeros(1)]}),
        (r"the keyword per_layer \(", {"per_layer": {"a": torch.zeros(1)}}),
        (r"the keyword read_index \(", {"read_index": [torch.zeros(3)]}),
        (r"the keyword temperature \(0.5\)", {"temperature": 0.5}),
        (r"the keyword num_sinks \(4\)", {"num_sinks": 4}),
        (r"the keyword is_sparse \(True\)", {"is_sparse": True}),
        (r"the keyword kind \('sparse'\)", {"kind": "sparse"}),
    ],
)
def test_n10_keywords_are_refused_by_name(what: str, options: dict[str, Any]) -> None:
    """llama.cpp PR#24908, transformers PR#41083: a choice of keys, or sinks, given as keywords."""
    q, k, v = qkv()
    with pytest.raises(ValueError, match=REFUSED + what):
        attended(q, k, v, **options)
    # The same keywords without a value ask for nothing.
    assert torch.equal(attended(q, k, v, **dict.fromkeys(options)), attended(q, k, v))


@pytest.mark.parametrize("value", [None, False, 0, 0.0, (), [], {}, (None, 0)], ids=repr)
def test_n10_neutral_values_are_accepted(value: Any) -> None:
    q, k, v = qkv()
    assert torch.equal(attended(q, k, v, unheard_of=value, softcap=value), attended(q, k, v))


def test_n10_harmless_keywords_are_accepted() -> None:
    q, k, v = qkv()
    options = {
        "position_ids": torch.arange(5)[None], "use_cache": True, "output_hidden_states": True,
        "num_items_in_batch": torch.tensor(5), "cu_seq_lens_q": torch.tensor([0, 5]), "max_length_q": 5,
        "sliding_window": -1, "window_size": (-1, -1), "sinks": None, "block_indices": None,
    }  # fmt: skip
    assert torch.equal(attended(q, k, v, **options), attended(q, k, v))


@torch.no_grad()
def test_n10_a_model_that_chooses_key_blocks() -> None:
    """llama.cpp PR#24908, transformers#46762: dense attention is not this model."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 64, "dense_intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
        "mlp_layer_types": ["dense"] * 2, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8,
        "index_local_blocks": 1, "index_topk_blocks": 2,
    }  # fmt: skip
    tokens = torch.tensor(prompts(40))
    for kind, is_refused in (("minimax_m3_sparse", True), ("full_attention", False)):
        config = transformers.MiniMaxM3VLTextConfig(**COMMON, **sizes, layer_types=[kind] * 2)
        torch.manual_seed(0)
        model = transformers.MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="eager").eval()
        expected = model(tokens).logits
        if is_refused:
            with pytest.raises(ValueError, match=f"{REFUSED}a choice of key blocks"):
                chosen(model)(tokens)
        else:
            torch.testing.assert_close(chosen(model)(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def module_of(source: str, name: str) -> Any:
    """An attention module of a file whose `eager_attention_forward` is this source."""
    import sys

    file = types.ModuleType(name)
    sys.modules[name] = file
    exec(source, vars(file))
    return type("Attention", (torch.nn.Module,), {"__module__": name})()


def test_n10_features_that_a_module_has_itself() -> None:
    """Whatever the model's own attention reads from its module beside the usual."""
    q, k, v = qkv()
    source = (
        "def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):\n"
        "    scores = query @ key.transpose(2, 3) * scaling * module.training / module.num_key_value_groups\n"
        "    return (scores + module.decay).softmax(-1) @ value, module.head_dim\n"
    )
    module = module_of(source, "model_with_decay")
    module.head_dim, module.num_key_value_groups = 16, 2
    assert torch.equal(attended(q, k, v, module=module), attended(q, k, v))
    module.decay = None
    assert torch.equal(attended(q, k, v, module=module), attended(q, k, v))
    module.decay = torch.zeros(4)
    with pytest.raises(ValueError, match=f"{REFUSED}an attention of its own .it reads decay"):
        attended(q, k, v, module=module)


@torch.no_grad()
def test_n10_sinks_of_a_real_model() -> None:
    """transformers PR#41083."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.GptOssConfig(**COMMON, **sizes, head_dim=16, layer_types=["full_attention"])
    module = GptOssAttention(config, 0).eval()
    with pytest.raises(ValueError, match=f"{REFUSED}attention sinks"):
        attended(*qkv(), module=module)
    module.sinks = None
    assert torch.equal(attended(*qkv(), module=module), attended(*qkv()))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Falcon", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}),
        ("Falcon", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}),
        ("XGLM", {"d_model": 64, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}),
        ("GPTNeo", {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}),
        ("GPTNeoXJapanese", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
    ],
)
@torch.no_grad()
def test_models_with_an_attention_of_their_own(name: str, options: dict[str, Any]) -> None:
    model = built(name, **options)
    expected = model(torch.tensor(prompts(9))).logits
    what = f"{REFUSED}{name}ForCausalLM, a model that computes its attention by itself"
    with pytest.raises(ValueError, match=what):
        chosen(model)
    assert torch.equal(model(torch.tensor(prompts(9))).logits, expected)
    with pytest.raises(ValueError, match=f"{REFUSED}{name}\\w+, a model that computes its attention by itself"):
        type(model)._from_config(model.config, attn_implementation="numba_prefix")


def test_a_mask_has_no_further_methods() -> None:
    """A model that asks the mask for its size would compute with it next."""
    from numba_prefix.integrations.transformers.mask import lengths_mask

    mask = lengths_mask(2, 5, 5)
    assert not hasattr(mask, "size")
    for name in ("size", "unsqueeze", "expand", "view"):
        with pytest.raises(ValueError, match=f"computes its attention by itself .it used {name} on the mask"):
            getattr(mask, name)(1)


# --- N11: the width of the attention mask


@pytest.fixture(params=["dynamic", "static"])
def past(request: pytest.FixtureRequest) -> Any:
    """A network, tokens, and a function that gives a cache of the first five."""
    model = chosen(model_of("llama"))
    tokens = torch.tensor(prompts(7, 7))

    def cache(batch: int) -> Any:
        made = (
            transformers.DynamicCache(config=model.config)
            if request.param == "dynamic"
            else transformers.StaticCache(config=model.config, max_cache_len=16)
        )
        with torch.no_grad():
            model(tokens[:batch, :5], cache=made)
        return made

    return model, tokens, cache


@pytest.mark.parametrize(
    ("begin_end", "mask"),
    [
        ((5, 6), [[1]]),
        ((5, 7), [[1, 1]]),
        ((5, 7), [[1] * 6]),
        ((5, 6), [[1] * 5]),
        ((5, 6), [[1], [1]]),
        ((5, 6), [[]]),
    ],
    ids=["only_the_new", "two_new", "one_short", "without_the_new", "two_sequences", "empty"],
)
@torch.no_grad()
def test_n11_a_mask_too_narrow(past: Any, begin_end: tuple[int, int], mask: list[list[int]]) -> None:
    """transformers#4130, #18104: a mask of the new tokens only made all of them padding."""
    model, tokens, cache = past
    begin, end = begin_end
    given = torch.tensor(mask, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"attention_mask: got a width of {given.shape[1]}, expected {end}: 5 past"):
        model(tokens[: len(mask), begin:end], cache=cache(len(mask)), attention_mask=given)


@torch.no_grad()
def test_n11_a_mask_too_wide_is_cut(past: Any) -> None:
    model, tokens, cache = past
    logits = [
        model(tokens[:1, 5:7], cache=cache(1), attention_mask=torch.ones(1, n, dtype=torch.int64)).logits
        for n in (7, 9, 15)
    ]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    torch.testing.assert_close(logits[0], model(tokens[:1]).logits[:, 5:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 7), (3, 7), (2, 7, 7), (7,)], ids=str)
@torch.no_grad()
def test_n11_a_mask_of_other_sequences(shape: tuple[int, ...]) -> None:
    model = chosen(model_of("llama"))
    with pytest.raises(ValueError, match=r"attention_mask: got shape \[.*\], expected \[2, 7\]"):
        model(torch.tensor(prompts(7, 7)), attention_mask=torch.ones(shape, dtype=torch.int64))


def test_n11_a_mask_made_for_another_pass() -> None:
    from numba_prefix.integrations.transformers.mask import lengths_mask

    q, k, v = qkv(batch=2)
    expected = attended(q, k, v, mask=lengths_mask(2, 5, 5))
    assert torch.equal(expected, attended(q, k, v))
    for other in (lengths_mask(1, 5, 5), lengths_mask(3, 5, 5), lengths_mask(2, 4, 4), lengths_mask(2, 5, 9, 4)):
        with pytest.raises(ValueError, match=f"{REFUSED}a mask for . sequences of . new tokens"):
            attended(q, k, v, mask=other)


def test_a_padded_cache_with_too_many_slots() -> None:
    """Slots are counted over all heads; their numbers must not wrap around."""
    from numba_prefix.integrations.transformers.contiguous import _tables
    from numba_prefix.integrations.transformers.spans import Spans

    key = torch.empty((1100, 32, 65536, 16), device="meta")
    with pytest.raises(ValueError, match=f"{REFUSED}a padded cache of {1099 * 32 * 65536 + 65536} slots"):
        _tables(key, Spans([0] * 1100, [1] * 1100, [5] * 1100, [9] * 1100, 1))
    assert _tables(key[:1000], Spans([0] * 1000, [1] * 1000, [5] * 1000, [9] * 1000, 1)).shape == (1000, 65536)


# --- N01: dtypes as autocast mixes them; other dtypes


@pytest.mark.parametrize("kind", ["llama", "qwen3", "bloom"])
@torch.no_grad()
def test_n01_under_autocast(kind: str) -> None:
    """transformers PR#35834, xformers#742: queries and keys stay in float32."""
    model = model_of(kind)
    inputs = padded(prompts(5, 40, 19))
    tokens = inputs["attention_mask"].bool()
    exact = model(**inputs).logits[tokens]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = model(**inputs).logits[tokens]
        before = integration.counts().runs
        ours = chosen(model)(**inputs).logits[tokens]
        assert integration.counts().runs - before == NUM_LAYERS
        made = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert made.shape == (3, 46)
    assert ours.dtype == eager.dtype
    # Rounding differs; the error must not be another kind of error.
    assert (ours - exact).abs().mean() < 3 * (eager - exact).abs().mean()


@pytest.mark.parametrize("odd", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_n01_one_tensor_in_another_dtype(odd: int, dtype: str) -> None:
    """Without autocast the values' dtype; with it, autocast's."""
    half = getattr(torch, dtype)
    mixed = [t.to(half) if i == odd else t for i, t in enumerate(qkv())]
    expected = attended(*(t.to(mixed[2].dtype) for t in mixed))
    assert torch.equal(attended(*mixed), expected)
    assert expected.dtype == mixed[2].dtype
    with torch.autocast("cpu", dtype=half):
        assert torch.equal(attended(*mixed), attended(*(t.to(half) for t in mixed)))


def test_n01_values_in_bfloat16() -> None:
    q, k, v = qkv()
    out = attended(q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attended(q, k, v), rtol=0.03, atol=0.03)


@torch.no_grad()
def test_other_dtypes_are_refused_by_name() -> None:
    q, k, v = qkv()
    for tensors, what in (
        ((q.double(), k.double(), v.double()), "queries in float64"),
        ((q, k.double(), v), "keys in float64"),
        ((q, k, v.to(torch.float8_e4m3fn)), "values in float8_e4m3fn"),
    ):
        with pytest.raises(ValueError, match=REFUSED + what):
            attended(*tensors)
    with pytest.raises(ValueError, match=f"{REFUSED}queries in float64"):
        chosen(model_of("llama").double())(torch.tensor(prompts(9)))
    with pytest.raises(ValueError, match=f"{REFUSED}queries in float64"):
        chosen(model_of("bloom").double())(torch.tensor(prompts(9)))


# --- N03: head sizes


def latent() -> Any:
    """A network whose keys are 32 wide and its values 16."""
    return built(
        "DeepseekV3", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=2, initializer_range=0.3, max_position_embeddings=512,
    )  # fmt: skip


def wide() -> Any:
    return model_of("llama", head_dim=512, num_attention_heads=1, num_key_value_heads=1)


@pytest.mark.parametrize(
    ("make", "what"),
    [(latent, r"values of another head size than keys \(16, not 32\)"), (wide, "head size 512")],
    ids=["values", "512"],
)
@torch.no_grad()
def test_n03_head_sizes_are_refused_by_name(make: Any, what: str) -> None:
    """transformers PR#35926, vllm#39065."""
    model = make()
    assert torch.isfinite(model(torch.tensor(prompts(9))).logits).all()
    with pytest.raises(ValueError, match=REFUSED + what):
        chosen(model)(torch.tensor(prompts(9)))
    outputs = chosen(make()).generate_batch(
        inputs=prompts(9, 4),
        generation_config=transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=96),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=8, num_blocks=24, max_batch_tokens=32
        ),
    )
    assert len(outputs) == 2
    # In the paged cache of transformers latent keys have no place, whatever the implementation.
    assert all("got 'numba_prefix' with" in o.error and "head size" in o.error for o in outputs.values())


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ((16, 16, 8), "values of another head size than keys"),
        ((16, 16, 32), "values of another head size than keys"),
        ((8, 16, 16), "queries of another head size than keys"),
        ((257, 257, 257), "head size 257"),
    ],
    ids=str,
)
def test_n03_head_sizes_of_tensors(sizes: tuple[int, ...], what: str) -> None:
    tensors = [torch.randn(1, 2, 5, n) for n in sizes]
    with pytest.raises(ValueError, match=REFUSED + what):
        attended(*tensors)
    assert attended(*(torch.randn(1, 2, 5, 256) for _ in range(3))).shape == (1, 5, 2, 256)


# --- N02: compiled models

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


# --- models on a GPU


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_on_a_gpu(monkeypatch: pytest.MonkeyPatch, side: str, kv_heads: int) -> None:
    """Tables and rows of padding lie where the keys are."""
    from numba_prefix.integrations.transformers.mask import lengths_mask

    padding = None if side == "none" else padded([[2] * 3, [2] * 9], side)["attention_mask"]
    tensors = qkv(kv_heads=kv_heads, tokens=9, batch=2)
    expected = attended(*tensors, mask=lengths_mask(2, 9, 9, attention_mask=padding))
    with torch_gpu.fake_torch_gpu(monkeypatch) as gpu:
        there = [torch_gpu.on_gpu(t.clone()) for t in tensors]
        given = None if padding is None else padding.to(torch_gpu.GPU)
        mask = lengths_mask(2, 9, 9, attention_mask=given, device=torch_gpu.GPU)
        for _ in range(2):  # the second layer takes the first one's plan
            out = attended(*there, mask=mask)
            assert out.device == torch_gpu.GPU
            torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
        assert len(gpu.launches) == 2


def through_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the attention of every layer computed on the fake GPU, the rest of a network here."""
    from numba_prefix.integrations.transformers import alibi, attention

    attend = attention.attend

    def attend_there(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return attend(*map(torch_gpu.on_gpu, (query, key, value)), *rest).cpu()

    monkeypatch.setattr(attention, "attend", attend_there)
    monkeypatch.setattr(alibi, "attend", attend_there)


@pytest.mark.parametrize("kind", ["llama", "bloom", "mpt"])
@torch.no_grad()
def test_a_network_through_a_gpu(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, inputs = model_of(kind), padded(prompts(5, 11))
    tokens = inputs["attention_mask"].bool()
    expected = model(**inputs).logits[tokens]
    chosen(model)
    through_a_gpu(monkeypatch)
    with torch_gpu.fake_torch_gpu(monkeypatch) as gpu:
        cache = transformers.DynamicCache(config=model.config)
        parts = [
            model(inputs["input_ids"][:, a:b], attention_mask=inputs["attention_mask"][:, :b], cache=cache).logits
            for a, b in ((0, 8), (8, 11))
        ]
        assert len(gpu.launches) == 2 * NUM_LAYERS
    torch.testing.assert_close(torch.cat(parts, 1)[tokens], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_real_kernels_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network with a left-padded batch, and a layer of continuous batching."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    import cuda_target
    from ptx.device import interpreted

    from numba_prefix.cuda.compile import cubins

    monkeypatch.setattr(cubins, "kernel", cuda_target.compiled)

    model, inputs = chosen(model_of("llama")), padded(prompts(5, 11))
    expected = model(**inputs).logits
    *_, paged = paged_pass(lambda t: t)
    with torch_gpu.fake_torch_gpu(monkeypatch, execute=interpreted) as gpu:
        *_, out = paged_pass(torch_gpu.on_gpu)
        torch.testing.assert_close(out.cpu(), paged, rtol=1e-4, atol=1e-5)
        through_a_gpu(monkeypatch)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
        assert len(gpu.launches) == 1 + NUM_LAYERS


def paged_pass(place: Any) -> Any:
    """Writes and attends as a layer of continuous batching does, with a prompt and a sequence that
    goes on; two tokens are padding."""
    from numba_prefix.integrations.transformers import paged

    torch.manual_seed(2)
    blocks = [place(torch.randn(8, 4, 2, 16)) for _ in range(2)]
    slots = ([4, 5, 6, 7, 20, 21, 22], [12, 13, 14, 15, 0, 1])
    kwargs = {
        "cu_seq_lens_q": place(torch.tensor([0, 7, 8])),
        "cu_seq_lens_k": {"full_attention": place(torch.tensor([0, 7, 13]))},
        "read_index": [place(torch.tensor(slots[0] + slots[1]))],
        "write_index": [place(torch.tensor([*slots[0], 1]))],
    }

    def write(key: Any, value: Any, layer_idx: int, read_index: Any, write_index: Any) -> None:
        for cache, new in zip(blocks, (key, value), strict=True):
            cache.view(-1, 2, 16)[write_index] = new[: len(write_index)]

    allocator = types.SimpleNamespace(
        index=0, tokens_per_page=4, layer_type="full_attention", update=write,
        get_cache_for_block_table=lambda layer_idx: blocks,
    )  # fmt: skip
    cache = types.SimpleNamespace(layer_to_allocator=[allocator])
    new = [place(torch.randn(1, 2, 10, 16)) for _ in range(2)]
    query = place(torch.randn(1, 4, 10, 16))
    key, value = paged.update(cache, *new, 0, kwargs)
    layer_cache = kwargs[paged.PAGED_CACHE]
    assert layer_cache.batch.tables.tolist() == [[1, 5], [3, 0]]
    return query, key, value, layer_cache, attended(query, key, value, **kwargs)


def test_continuous_batching_through_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, expected = paged_pass(lambda t: t)
    assert (expected[0, 8:] == 0).all()
    assert (expected[0, :8] != 0).all()
    with torch_gpu.fake_torch_gpu(monkeypatch) as gpu:
        _, _, _, cache, out = paged_pass(torch_gpu.on_gpu)
        assert (cache.batch.tables.device, out.device) == (torch_gpu.GPU, torch_gpu.GPU)
        assert len(gpu.launches) == 1
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_keys_that_are_changed_after_they_were_cached() -> None:
    """The paged cache is read, so what the model makes of it afterwards would be dropped."""
    query, key, value, cache, expected = paged_pass(lambda t: t)
    options = {"numba_prefix_paged_cache": cache}
    assert torch.equal(attended(query, key.clone(), value.clone(), **options), expected)
    for changed, what in (((key * 2, value), "keys"), ((key, value[:, :1]), "values")):
        with pytest.raises(ValueError, match=f"{REFUSED}{what} that the model changes"):
            attended(query, *changed, **options)
