"""Arguments of the validators, small and right but for what a test changes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from numba_prefix.inputs.problem import Operands, Problem, static_problem

FORM = re.compile(r"^[a-z_]+: got .+, expected .+", re.DOTALL)
TOKENS, HEADS, KV_HEADS, HEAD_SIZE, BLOCKS, BLOCK_SIZE, BATCH, WIDTH = 5, 4, 2, 8, 6, 3, 2, 3
NAN, INF = float("nan"), float("inf")


class OnGpu:
    """An int32, float16 or float32 array on a GPU, as far as its description goes."""

    def __init__(self, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (4096, False), "version": 3}


def given(**changes: Any) -> dict[str, Any]:
    cache = (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    return {
        "query": np.zeros((TOKENS, HEADS, HEAD_SIZE), np.float16),
        "key": np.zeros(cache, np.float16),
        "value": np.zeros(cache, np.float16),
        "block_tables": np.zeros((BATCH, WIDTH), np.int32),
    } | changes


def solve(**changes: Any) -> tuple[Problem, Operands]:
    return static_problem(**given(**changes))


def zeros(*shape: int, dtype: Any = np.float16) -> Any:
    return np.zeros(shape, dtype)


def refused(error: type[Exception], argument: str, says: str, call: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=says) as caught:
        call(*args, **kwargs)
    assert caught.type is error
    assert FORM.match(str(caught.value)), str(caught.value)
    assert str(caught.value).startswith(f"{argument}: got "), str(caught.value)
