"""The contenders: this package, and peers where they are installed.

Each is a function of no arguments that computes one call on the same data. A peer's preparations
(its own cache layout, gathered keys) are not timed.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba_prefix as nbp
from bench.cases import Data
from numba_prefix.cpu import isa

Run = Callable[[], Any]


@contextlib.contextmanager
def forced(path: str | None) -> Iterator[None]:
    """Make plans take this instruction-set path; None: the path that they would take anyway."""
    before = os.environ.get(isa.VARIABLE)
    if path is not None:
        os.environ[isa.VARIABLE] = path
    try:
        yield
    finally:
        if path is not None:
            os.environ.pop(isa.VARIABLE)
            if before is not None:
                os.environ[isa.VARIABLE] = before


def ours(data: Data, mask_type: str = "causal", path: str | None = None, **arguments: Any) -> Run:
    """A plan that is reused, as a network does for its layers."""
    import torch

    out = torch.full_like(data.query, float("nan"))
    case = data.case
    with forced(path):
        size, op = nbp.self_attention_prefix_encoder_get_workspace_size(
            data.query, data.key, data.value, data.block_tables, arguments.pop("mask", None), case.q_len, case.kv_len,
            arguments.pop("slopes", None), mask_type, case.head_num, case.kv_head_num, 1 / math.sqrt(case.head_size), out,
            nbp.Context(**arguments),
        )  # fmt: skip
    workspace = torch.empty(size, dtype=torch.uint8)

    def run() -> Any:
        nbp.self_attention_prefix_encoder(workspace, size, op)
        return out

    return run


def one_shot(data: Data, num_threads: int) -> Run:
    """A call that plans each time."""
    case = data.case
    arrays = data.query, data.key, data.value, data.block_tables, case.q_len, case.kv_len

    def run() -> Any:
        return nbp.prefix_encoder(*arrays, qk_scale=1 / math.sqrt(case.head_size), num_threads=num_threads)

    return run


def load_vllm() -> bool:
    """Load vLLM's CPU operators from $NUMBA_PREFIX_BENCH_VLLM (a _C*.abi3.so of the wheel) or an
    installed vllm package: the library that this CPU can run."""
    import importlib.util

    import torch

    path = os.environ.get("NUMBA_PREFIX_BENCH_VLLM")
    if not path:
        spec = importlib.util.find_spec("vllm")
        folder = Path(spec.origin).parent if spec and spec.origin else None
        name = "_C" if torch.cpu._is_avx512_supported() else "_C_AVX2"
        found = list(folder.glob(f"{name}.*so")) if folder else []
        path = str(found[0]) if found else None
    if not path:
        return False
    torch.ops.load_library(path)
    return True


def has_sglang() -> bool:
    import torch

    return hasattr(torch.ops._C, "extend_attention_cpu")


def sglang(data: Data) -> Run:
    """SGLang's kernel for new tokens behind a prefix, which is in vLLM's library too.

    Its cache is one line of slots with a table of each sequence's slots; it also takes the new
    tokens' keys and values side by side.
    """
    import torch

    case = data.case
    blocks, size, heads, depth = data.key.shape
    k_slots, v_slots = (torch.nan_to_num(x).reshape(blocks * size, heads, depth) for x in (data.key, data.value))
    slots = torch.zeros(len(case.q_len), max(case.kv_len), dtype=torch.int32)
    new = []
    for b, (q_len, kv_len) in enumerate(zip(case.q_len, case.kv_len, strict=True)):
        pages = data.block_tables[b, : -(-kv_len // size)]
        slots[b, :kv_len] = (pages[:, None] * size + torch.arange(size, dtype=torch.int32)).flatten()[:kv_len]
        new.append(slots[b, kv_len - q_len : kv_len].long())
    k_new, v_new = (x[torch.cat(new)].contiguous() for x in (k_slots, v_slots))
    starts = torch.tensor([0, *case.q_len[:-1]]).cumsum(0).int()
    requests, kv_len, q_len = torch.arange(len(case.q_len)), torch.tensor(case.kv_len), torch.tensor(case.q_len).int()
    out, scale = torch.full_like(data.query, float("nan")), 1 / math.sqrt(depth)

    def run() -> Any:
        torch.ops._C.extend_attention_cpu(
            data.query, k_new, v_new, out, k_slots, v_slots, slots, requests, kv_len, q_len, starts, max(case.q_len), scale,
            0.0, False, -1, None, None, None,
        )  # fmt: skip
        return out

    return run


def vllm(data: Data, isa: str, slopes: Any = None) -> Run:
    """vLLM's paged CPU attention; its own cache layout is filled beforehand."""
    import torch

    ops, case = torch.ops._C, data.case
    blocks, size, heads, depth = data.key.shape
    k_cache, v_cache = (torch.zeros(blocks, heads, size, depth, dtype=data.query.dtype) for _ in range(2))
    slots = torch.arange(blocks * size)
    k, v = (torch.nan_to_num(x).reshape(blocks * size, heads, depth) for x in (data.key, data.value))
    ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa, 1.0, 1.0, "auto")
    starts = torch.tensor([0, *case.q_len]).cumsum(0).int()
    kv_len = torch.tensor(case.kv_len, dtype=torch.int32)
    out, scale = torch.full_like(data.query, float("nan")), 1 / math.sqrt(depth)

    def run() -> Any:
        plan = ops.get_scheduler_metadata(
            len(case.q_len),
            case.head_num,
            heads,
            depth,
            kv_len,
            data.query.dtype,
            starts,
            True,
            -1,
            isa,
            True,
            None,
            "auto",
        )
        ops.cpu_attention_with_kv_cache(
            data.query, k_cache, v_cache, out, starts, kv_len, scale, True, slopes, -1, data.block_tables, 0.0, plan,
            None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    run()
    return run


def sdpa(data: Data) -> Run:
    """PyTorch's scaled_dot_product_attention, sequence by sequence, on keys gathered beforehand."""
    import torch

    case, start, parts = data.case, 0, []
    for b, (q_len, kv_len) in enumerate(zip(case.q_len, case.kv_len, strict=True)):
        pages = data.block_tables[b, : -(-kv_len // case.block_size)].long()
        k, v = (x[pages].flatten(0, 1)[:kv_len].transpose(0, 1)[None].contiguous() for x in (data.key, data.value))
        q = data.query[start : start + q_len].transpose(0, 1)[None].contiguous()
        start += q_len
        visible = torch.arange(kv_len)[None] <= torch.arange(q_len)[:, None] + (kv_len - q_len)
        parts.append((q, k, v, None if q_len == kv_len else visible))
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = case.head_num != case.kv_head_num

    def run() -> Any:
        done = [attend(q, k, v, attn_mask=m, is_causal=m is None, enable_gqa=grouped) for q, k, v, m in parts]
        return done

    return run


def joined(result: Any) -> Any:
    """A contender's result as [num_tokens, head_num, head_size]."""
    import torch

    return torch.cat([part[0].transpose(0, 1) for part in result]) if isinstance(result, list) else result
