"""The measured shapes, and their data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    name: str
    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    head_num: int
    kv_head_num: int
    head_size: int
    block_size: int

    @property
    def flops(self) -> float:
        """4 * head_size for each (query head, query, visible key); a causal mask halves a
        square."""
        pairs = sum(q * (kv - q) + q * (q + 1) / 2 for q, kv in zip(self.q_len, self.kv_len, strict=True))
        return 4.0 * self.head_size * self.head_num * pairs

    @property
    def is_decode(self) -> bool:
        """Whether each key serves so few rows that reading it takes most of the time."""
        return max(self.q_len) * self.head_num <= 8 * self.kv_head_num

    def kv_bytes(self, item: int) -> float:
        """Bytes of every key and value, read once."""
        return 2.0 * item * sum(self.kv_len) * self.kv_head_num * self.head_size


CASES = [
    Case("prefill-1k", (1024,), (1024,), 8, 8, 128, 128),
    Case("prefill-4k", (4096,), (4096,), 8, 8, 128, 128),
    Case("prefix-gqa", (512,) * 4, (2048,) * 4, 16, 4, 128, 128),
    Case("ragged", (7, 130, 513, 64), (519, 1154, 513, 4160), 16, 4, 128, 32),
    Case("d64", (1024,) * 2, (2048,) * 2, 16, 4, 64, 64),
    Case("decode", (1,) * 16, (2048,) * 16, 32, 8, 128, 128),
]
EXTRA_CASES = [
    Case("tiny", (16,), (144,), 8, 8, 128, 128),
    Case("long", (512,), (65536,), 16, 4, 128, 128),
    Case("decode-long", (1,), (131072,), 32, 8, 128, 128),
    Case(
        "ragged-64",
        tuple(1 + 37 * i % 96 for i in range(64)),
        tuple(200 + 331 * i % 3000 for i in range(64)),
        16,
        4,
        128,
        16,
    ),
]


@dataclass(frozen=True)
class Data:
    """The tensors of a case; key and value in the plain paged layout [num_blocks, block_size,
    kv_head_num, head_size]."""

    case: Case
    query: Any
    key: Any
    value: Any
    block_tables: Any


def make_data(case: Case, dtype: Any, seed: int = 0) -> Data:
    """Random tensors with shuffled blocks; every element that no sequence addresses is NaN."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    num_pages = [-(-kv // case.block_size) for kv in case.kv_len]
    num_blocks = sum(num_pages) + 2
    order = torch.randperm(num_blocks, generator=generator).int()
    tables = torch.zeros(len(case.q_len), max(num_pages), dtype=torch.int32)
    cache = (num_blocks, case.block_size, case.kv_head_num, case.head_size)
    key, value = (torch.full(cache, float("nan"), dtype=dtype) for _ in range(2))
    start = 0
    for b, pages in enumerate(num_pages):
        tables[b, :pages] = order[start : start + pages]
        start += pages
        slots = np.arange(case.kv_len[b])
        where = (tables[b].long()[slots // case.block_size], torch.from_numpy(slots % case.block_size))
        for kind in (key, value):
            kind[where] = torch.randn(case.kv_len[b], *cache[2:], generator=generator).to(dtype)
    query = torch.randn(sum(case.q_len), case.head_num, case.head_size, generator=generator).to(dtype)
    return Data(case, query, key, value, tables)
