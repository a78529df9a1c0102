"""What a model passes from its mask function to its attention: lengths, in the guise of a mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from numba_prefix.integrations.transformers.refusals import refuse
from numba_prefix.integrations.transformers.runs import Batch


@dataclass(slots=True, eq=False)
class Rows:
    """Where the tokens of a forward pass lie in its grids of queries [batch, q_length] and keys [batch, kv_length]."""

    q_begin: list[int]  # first query of each sequence that is no padding
    q_len: list[int]
    first_key: list[int]  # first key that is no padding
    kv_len: list[int]  # keys up to the last query

    def indices(self, q_length: int) -> tuple[Tensor, Tensor]:
        """(sequence, query) of every token, int64 [num_tokens] each, in order."""
        where = [
            (b, i)
            for b, (begin, n) in enumerate(zip(self.q_begin, self.q_len, strict=True))
            for i in range(begin, begin + n)
        ]
        both = torch.tensor(where, dtype=torch.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]


class LengthsMask(Tensor):
    """A mask that is never made: it carries the lengths, and refuses to be computed with.

    A model whose attention does not come from the interface would add it to its scores; that raises, by name.
    """

    rows: Rows
    batch: Batch | None  # of the first layer; the others take it over

    @staticmethod
    def of(rows: Rows) -> LengthsMask:
        # Four axes, as transformers expects of a mask that is complete.
        mask = torch.empty((len(rows.q_len), 1, 0, 0)).as_subclass(LengthsMask)
        mask.rows, mask.batch = rows, None
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PASSED_ON:
            return args[0]
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        name = getattr(func, "__name__", str(func))
        raise refuse(f"a model that computes its attention by itself (it called {name} on the mask)")


# A model may move its mask, or cast it to bool: what it carries stays.
_PASSED_ON = {Tensor.to, Tensor.bool, Tensor.contiguous, Tensor.detach}
_METADATA = {
    *(Tensor.dim, Tensor.size, Tensor.__len__, Tensor.__repr__, Tensor.is_floating_point),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "device", "dtype", "requires_grad", "is_cpu", "is_cuda")
    ),
}


def lengths_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> LengthsMask:
    """transformers' mask function for numba_prefix: the mask has to be causal, its padding at the ends of sequences."""
    if mask_function is not causal_mask_function or options.get("local_size") is not None:
        raise refuse(
            "a mask that is not plainly causal (a sliding window, chunks, packed sequences, or a function of its own)"
        )
    if kv_offset:
        raise refuse(f"a cache that has dropped its first {kv_offset} keys")
    past = int(q_offset)
    if attention_mask is None:
        return LengthsMask.of(all_rows(batch_size, q_length, past))
    return LengthsMask.of(_unpadded_rows(attention_mask, q_length, past))


def all_rows(batch: int, q_length: int, past: int) -> Rows:
    zeros = [0] * batch
    return Rows(zeros, [q_length] * batch, zeros, [past + q_length] * batch)


def _unpadded_rows(padding_mask: Tensor, q_length: int, past: int) -> Rows:
    """padding_mask: bool [batch, at least the keys so far], true for tokens."""
    is_token = padding_mask.detach().cpu().numpy().astype(bool)[:, : past + q_length]
    count = is_token.sum(axis=1)
    first = np.where(count > 0, is_token.argmax(axis=1), 0)
    end = first + count
    columns = np.arange(is_token.shape[1])
    if not np.array_equal(is_token, (columns >= first[:, None]) & (columns < end[:, None])):
        raise refuse("a padding mask with gaps (tokens, padding, tokens again)")
    begin = np.maximum(first - past, 0)
    q_len = np.maximum(end - past - begin, 0)
    kv_len = np.where(q_len > 0, end - first, 0)
    return Rows(begin.tolist(), q_len.tolist(), first.tolist(), kv_len.tolist())
