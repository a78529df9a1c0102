"""The operators of integrations/torch.py: values, schemas, graphs, gradients, and torch_npu's
spelling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import ALIBI, make_case

import numba_prefix as nbp

torch = pytest.importorskip("torch")
ops = pytest.importorskip("numba_prefix.integrations.torch")

OPTIONS = ("mask_type", "mask", "slopes", "head_num", "kv_head_num", "qk_scale")


def tensor(x: Any) -> Any:
    if x is None or isinstance(x, (int, float, str)):
        return x
    if isinstance(x, tuple):
        return torch.tensor(x, dtype=torch.int32)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def problem(dtype: str = "float16") -> tuple[list[Any], dict[str, Any]]:
    """The operator's arrays and options."""
    case = make_case([3, 20, 1], [9, 20, 40], head_num=4, kv_head_num=2, dtype=dtype)
    given = {name: tensor(value) for name, value in case.arguments().items()}
    arrays = [given.pop(name) for name in ("query", "key", "value", "block_tables", "seq_len", "kv_seq_len")]
    return arrays, given


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("form", ["none", "alibi_sqrt", "template", "heads"])
def test_values_are_the_functions(dtype: str, form: str) -> None:
    arrays, options = mask_problem(dtype, form)
    expected, expected_lse = nbp.prefix_encoder(*arrays, **options, return_lse=True)
    assert torch.equal(torch.ops.numba_prefix.prefix_encoder(*arrays, **options), expected)
    out, lse = torch.ops.numba_prefix.prefix_encoder_lse(*arrays, **options)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    by_position = [
        options.get(name, default) for name, default in zip(OPTIONS, ("causal", *[None] * 4, 1.0), strict=True)
    ]
    assert torch.equal(torch.ops.numba_prefix.prefix_encoder(*arrays, *by_position), expected)


def mask_problem(dtype: str, form: str) -> tuple[list[Any], dict[str, Any]]:
    arrays, options = problem(dtype)
    if form == "alibi_sqrt":
        options |= {"mask_type": "alibi_sqrt", "slopes": torch.tensor([0.5, 0.25, 1.0, 0.0])}
    elif form == "template":
        template = tensor(nbp.alibi_mask("alibi", "float32"))
        options |= {"mask_type": "alibi", "mask": template, "slopes": torch.tensor([-0.5, -0.25, -1.0, 0.0])}
    elif form == "heads":
        options |= {"mask_type": "alibi", "mask": torch.randn(4, 128, 128)}
    return arrays, options


@pytest.mark.parametrize("name", ["prefix_encoder", "prefix_encoder_lse"])
@pytest.mark.parametrize("form", ["none", "template"])
def test_opcheck(name: str, form: str) -> None:
    arrays, options = mask_problem("float32", form)
    arrays[0] = arrays[0].flatten(1)
    options |= {"head_num": 4, "kv_head_num": 2}
    operator = getattr(torch.ops.numba_prefix, name).default
    results = torch.library.opcheck(operator, tuple(arrays), options)
    assert set(results.values()) == {"SUCCESS"}


def test_within_a_compiled_graph() -> None:
    """Without a break in the graph, and without another graph for other lengths."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def layer(*arrays: Any) -> Any:
        return torch.ops.numba_prefix.prefix_encoder(*arrays, qk_scale=0.25) * 2

    for seq_len, kv_seq_len in (((3, 20), (9, 20)), ((5, 21), (30, 40)), ((2, 2), (2, 7))):
        case = make_case(
            seq_len, kv_seq_len, head_num=9, kv_head_num=3
        )  # no two sizes alike, which torch would hold equal
        given = case.arguments()
        arrays = [tensor(given[n]) for n in ("query", "key", "value", "block_tables", "seq_len", "kv_seq_len")]
        assert torch.equal(layer(*arrays), nbp.prefix_encoder(*arrays, qk_scale=0.25) * 2)
    assert len(graphs) == 1


def test_tensors_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba_prefix.cpu import target

    seen: list[int] = []
    bind = target.bind
    monkeypatch.setattr(
        target,
        "bind",
        lambda plan, o, *rest: (seen.extend(t.address for t in (o.q, o.k_cache, o.v_cache)), bind(plan, o, *rest))[1],
    )
    arrays, options = problem("bfloat16")
    torch.ops.numba_prefix.prefix_encoder(*arrays, **options)
    assert seen[-3:] == [t.data_ptr() for t in arrays[:3]]


def test_no_gradient() -> None:
    arrays, options = problem("float32")
    arrays[1].requires_grad_()
    with pytest.raises(RuntimeError, match=r"no gradient: expected torch.no_grad"):
        torch.ops.numba_prefix.prefix_encoder(*arrays, **options)
    with pytest.raises(RuntimeError, match="no gradient"):
        torch.ops.numba_prefix.prefix_encoder_lse(*arrays, **options)
    with torch.no_grad():
        out = torch.ops.numba_prefix.prefix_encoder(*arrays, **options)
    assert not out.requires_grad and not out.isnan().any()


def test_errors_name_the_argument() -> None:
    arrays, options = problem()
    arrays[4] = torch.tensor([3, 20, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="seq_len: got lengths that sum to 25, expected 24"):
        torch.ops.numba_prefix.prefix_encoder(*arrays, **options)


# --- torch_npu's spelling


def npu(arrays: list[Any], **options: Any) -> Any:
    query, key, value, tables, seqlen, kv_seqlen = arrays
    return ops.npu_self_attention_prefix_encoder(
        query, key, value, tables, seqlen, kv_seqlen, q_headnum=4, qk_scale=0.25, kv_headnum=2, **options
    )


@pytest.mark.parametrize(
    ("mask_type", "kind"),
    [
        (None, "causal"),
        ("mask_type_causal_mask", "causal"),
        ("mask_type_norm_compress", "causal"),
        ("mask_type_alibi_compress", "alibi"),
        ("mask_type_alibi_compress_sort", "alibi_sqrt"),
    ],
)
def test_npu_operator(mask_type: str | None, kind: str) -> None:
    arrays, _ = problem("bfloat16")
    extra: dict[str, Any] = {}
    if kind in ALIBI:
        template = tensor(nbp.alibi_mask(kind, "float32"))
        extra = {"mask": template, "slopes": torch.tensor([-0.5, -0.25, -1.0, 0.0])}
    elif mask_type == "mask_type_norm_compress":
        extra = {"mask": torch.ones(128, 128, dtype=torch.bfloat16).triu(1)}
    expected = nbp.prefix_encoder(*arrays, mask_type=kind, qk_scale=0.25, **extra)
    assert torch.equal(npu(arrays, mask_type=mask_type, **extra), expected)
    flat = [arrays[0].flatten(1), arrays[1].flatten(2), arrays[2].flatten(2), *arrays[3:]]
    flat[4:] = [x.tolist() for x in flat[4:]]
    assert torch.equal(npu(flat, mask_type=mask_type, **extra), expected.flatten(1))


def test_npu_operator_refuses_the_example_of_its_page() -> None:
    """512 rows of queries for lengths that sum to 128, a cache of 28 heads for 4 kv heads."""
    key = torch.zeros(8, 128, 28, 128, dtype=torch.float16)
    arguments = (torch.zeros(512, 28, 128, dtype=torch.float16), key, key, torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"key: got shape .*kv_head_num 4"):
        ops.npu_self_attention_prefix_encoder(*arguments, [64, 64], [128, 128], 28, 1.0, 4)
    with pytest.raises(ValueError, match="seq_len: got lengths that sum to 128, expected 512"):
        ops.npu_self_attention_prefix_encoder(*arguments, [64, 64], [128, 128], 28, 1.0, 28)
    with pytest.raises(ValueError, match="mask_type"):
        npu(problem()[0], mask_type="mask_type_unknown")
