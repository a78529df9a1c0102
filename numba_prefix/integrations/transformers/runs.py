"""The operator's run for a layer: the first layer of a forward pass plans, others reuse its
plan."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from numba_prefix.front.encoder import self_attention_prefix_encoder_get_workspace_size
from numba_prefix.front.operation import Context, Op


@dataclass(slots=True)
class Counts:
    """Totals of this process's computations; the difference of two covers the time between."""

    plans: int = 0  # operations planned: one for all layers of a forward pass
    runs: int = 0  # layers computed
    query_tokens: int = 0  # of the planned operations: one layer of each forward pass
    key_tokens: int = 0  # keys that the planned operations read


# A layer's attention follows other layers' products on the same threads, torch's.
_CONTEXTS = {"cpu": Context(pool="torch")}
_counts = Counts()
_lock = threading.Lock()


def counts() -> Counts:
    """The counts so far, of all models and threads."""
    with _lock:
        return replace(_counts)


def _count(batch: Batch, is_planned: bool) -> None:
    with _lock:
        _counts.runs += 1
        if is_planned:
            _counts.plans += 1
            _counts.query_tokens += sum(batch.q_len)
            _counts.key_tokens += sum(batch.kv_len)


@dataclass(slots=True, eq=False)
class Batch:
    """The sequences of one forward pass, and the operations planned for its layers."""

    tables: Tensor  # int32 [batch, max_block_num]
    q_len: list[int]
    kv_len: list[int]
    plans: dict[Any, Op] = field(default_factory=dict)  # by everything that layers may differ in

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, qk_scale: float, slopes: Tensor | None = None
    ) -> None:
        """Attention of one layer, causal or (slopes, float32 [head_num]) linear ALiBi.

        query, out [num_tokens, head_num, head_size]; key, value [num_blocks, block_size,
        kv_head_num, head_size].
        """
        layout = (query.dtype, query.shape, key.shape[1:], value.shape[1:], qk_scale, slopes is None)
        op = self.plans.get(layout)
        is_planned = op is None
        if op is None:
            kind = "causal" if slopes is None else "alibi"
            _, op = self_attention_prefix_encoder_get_workspace_size(
                query, key, value, self.tables, None, self.q_len, self.kv_len, slopes, kind, query.shape[1],
                key.shape[2], qk_scale, out, _CONTEXTS.get(query.device.type),
            )  # fmt: skip
            self.plans[layout] = op
        else:
            op.rebind(query=query, key=key, value=value, slopes=slopes, attn_out=out)
        op.run()
        _count(self, is_planned)
