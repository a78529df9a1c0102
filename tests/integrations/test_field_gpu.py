"""transformers' models on a GPU: a fake one, whose kernels are stood in for or interpreted."""

from __future__ import annotations

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("numba_prefix.integrations.transformers")
torch_gpu = pytest.importorskip("torch_gpu")
from networks import (  # noqa: E402
    NUM_LAYERS,
    REFUSED,
    attended,
    chosen,
    model_of,
    padded,
    prompts,
    qkv,
)

pytestmark = pytest.mark.usefixtures("registered")


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
