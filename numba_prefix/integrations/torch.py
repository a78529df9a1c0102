"""PyTorch operators, registered by importing this module; they work in eager mode and inside
torch.compile graphs.

    torch.ops.numba_prefix.prefix_encoder(query, key, value, block_tables, seq_len, kv_seq_len, …)
        -> out
    torch.ops.numba_prefix.prefix_encoder_lse(query, key, value, block_tables, seq_len, kv_seq_len,
        …) -> out, lse

Arguments are those of numba_prefix.prefix_encoder, the lengths as integer tensors in CPU memory and
mask_type by its name. Tensors are read in place: all of them but the lengths on the CPU, or on one
GPU, which computes on torch's current stream. No gradient is computed: an input that requires one
is an error while gradients are on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from numba_prefix.front.encoder import prefix_encoder as encode

__all__ = ["npu_self_attention_prefix_encoder", "prefix_encoder", "prefix_encoder_lse"]

_ARRAYS = "Tensor query, Tensor key, Tensor value, Tensor block_tables, Tensor seq_len, Tensor kv_seq_len"
# torch allows no keyword-only tensors in a custom operator.
_OPTIONS = (
    "str mask_type='causal', Tensor? mask=None, Tensor? slopes=None, int? head_num=None, int? kv_head_num=None, "
    "float qk_scale=1.0"
)
_ARRAY_NAMES = ("query", "key", "value", "block_tables", "seq_len", "kv_seq_len")
_OPTION_NAMES = ("mask_type", "mask", "slopes", "head_num", "kv_head_num", "qk_scale")


def _operator(name: str, function: Any, fake: Any, returns: str) -> Any:
    schema = f"({_ARRAYS}, {_OPTIONS}) -> {returns}"
    # Every call makes a plan, which a CUDA graph cannot hold; torch.compile then leaves the
    # operator out of its graphs.
    tags = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
    operator = torch.library.custom_op(
        f"numba_prefix::{name}", function, mutates_args=(), device_types=("cpu", "cuda"), schema=schema, **tags
    )
    operator.register_fake(fake)
    operator.register_autograd(_no_gradient, setup_context=_refuse_gradient)
    return operator


def _no_gradient(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError("numba_prefix computes no gradient")


def _refuse_gradient(ctx: Any, inputs: Any, output: Any) -> None:
    """Refuse an input whose gradient is being recorded: torch calls this for one."""
    raise RuntimeError("numba_prefix computes no gradient: expected torch.no_grad(), or inputs that require none")


def _options(by_position: tuple[Any, ...], by_name: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(_OPTION_NAMES, by_position, strict=False)) | by_name


def _encode(q: Any, k: Any, v: Any, tables: Any, q_len: Any, kv_len: Any, *options: Any, **named: Any) -> Any:
    return encode(q, k, v, tables, q_len, kv_len, **_options(options, named))


def _encode_lse(q: Any, k: Any, v: Any, tables: Any, q_len: Any, kv_len: Any, *options: Any, **named: Any) -> Any:
    return encode(q, k, v, tables, q_len, kv_len, return_lse=True, **_options(options, named))


def _check_memory(query: Tensor, *others: Any, **named: Any) -> None:
    """Refuse a tensor without memory beside a query that has some: torch then takes the operator
    for a description of the output, and would hand out one that nothing has been written to."""
    if query.device.type == "meta":
        return
    for name, given in (*zip(_ARRAY_NAMES + _OPTION_NAMES, (query, *others), strict=False), *named.items()):
        if isinstance(given, Tensor) and given.device.type == "meta":
            raise TypeError(f"{name}: got a tensor on meta, expected one on cpu or cuda, as query is")


def _fake(query: Tensor, *others: Any, **named: Any) -> Tensor:
    _check_memory(query, *others, **named)
    return query.new_empty(query.shape)


def _fake_lse(
    query: Tensor, k: Any, v: Any, tables: Any, q_len: Any, kv_len: Any, *options: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    _check_memory(query, k, v, tables, q_len, kv_len, *options, **named)
    heads = query.shape[1] if query.dim() == 3 else _options(options, named).get("head_num")
    if heads is None:
        raise ValueError(f"head_num: got None, expected an int, since query is 2-D (shape {tuple(query.shape)})")
    return query.new_empty(query.shape), query.new_empty((query.shape[0], heads), dtype=torch.float32)


prefix_encoder = _operator("prefix_encoder", _encode, _fake, "Tensor")
prefix_encoder_lse = _operator("prefix_encoder_lse", _encode_lse, _fake_lse, "(Tensor, Tensor)")


def npu_self_attention_prefix_encoder(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_tables: Tensor,
    seqlen: Tensor | list[int],
    kv_seqlen: Tensor | list[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    mask: Tensor | None = None,
    slopes: Tensor | None = None,
    mask_type: str | None = None,
) -> Tensor:
    """torch_npu's operator of that name, with its arguments and its mask strings, so that code
    written for Ascend runs elsewhere.

    query         float16, bfloat16 or float32 [num_tokens, q_headnum, head_size] or
                  [num_tokens, q_headnum * head_size]
    key, value    as query, [num_blocks, block_size, kv_headnum, head_size] (or the last two joined)
    block_tables  int32 [batch, max_block_num]
    seqlen, kv_seqlen  query tokens and total key tokens of each sequence, integer tensors in CPU
                  memory or lists
    mask, slopes  ATB's ALiBi template and its coefficients, float32 [q_headnum], negative as ATB's
                  callers pass them
    mask_type     "mask_type_causal_mask" (also None), "mask_type_norm_compress",
                  "mask_type_alibi_compress", "mask_type_alibi_compress_sort" (torch_npu's spelling
                  of sqrt), or any name that MaskType knows

    Returns a tensor like query. Raises TypeError and ValueError naming the argument as
    numba_prefix.prefix_encoder spells it.
    """
    # On the CPU whatever torch.set_default_device says.
    q_len, kv_len = (
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64, device="cpu") for x in (seqlen, kv_seqlen)
    )
    name = "mask_type_causal_mask" if mask_type is None else mask_type
    encoder = torch.ops.numba_prefix.prefix_encoder
    return encoder(query, key, value, block_tables, q_len, kv_len, name, mask, slopes, q_headnum, kv_headnum, qk_scale)
