"""Public reports of transformers' users as small cases: arguments, masks, dtypes and head sizes
(N01, N03, N10, N11)."""

from __future__ import annotations

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
integration = pytest.importorskip("numba_prefix.integrations.transformers")
from networks import (  # noqa: E402
    COMMON,
    NUM_LAYERS,
    REFUSED,
    attended,
    built,
    chosen,
    model_of,
    padded,
    prompts,
    qkv,
)

pytestmark = pytest.mark.usefixtures("registered")


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
