"""The problem of a call (shapes, dtypes, scale, mask kind) and the validators of every argument.

Every message reads "<argument>: got <what>, expected <what>": TypeError for a wrong type or dtype,
ValueError for a wrong value or shape. static_problem checks arrays, lengths.py checks lengths and
tables.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from numba_prefix.inputs.arrays import Tensor, as_numpy, bits, contiguous_strides, describe, overlaps
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.inputs.slopes import checked_slopes

FLOAT_DTYPES = ("float16", "bfloat16", "float32")
INTEGER_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
INT32_MAX = 2**31 - 1
MAX_HEAD_SIZE = 256
MAX_QK_SCALE = 2.3e38  # qk_scale * log2(e) has to stay finite in float32
INT32_MIN = -(2**31)
TEMPLATE_SHAPE = (256, 256)
NORM_TEMPLATE_SHAPE = (128, 128)
HEADS_MASK_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything that a plan depends on apart from the lengths and the addresses of the arrays."""

    dtype: str  # of query, key and value
    num_tokens: int
    batch: int
    head_num: int
    kv_head_num: int
    head_size: int
    num_blocks: int
    block_size: int
    max_block_num: int
    mask_type: MaskType
    mask_form: str  # "none", "template" ([256, 256]) or "heads" ([head_num, mask_len, 128])
    mask_dtype: str | None
    mask_len: int  # 0 unless mask_form is "heads"
    has_slopes: bool  # False also where slopes were given but don't enter ("heads")
    qk_scale: float

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.head_num // self.kv_head_num

    @property
    def options(self) -> dict[str, Any]:
        """Options of the call that are no arrays, as static_problem and the oracle take them."""
        return {"mask_type": self.mask_type, "qk_scale": self.qk_scale}

    @property
    def is_causal(self) -> bool:
        return self.mask_type is not MaskType.NONE


_problem = lru_cache(maxsize=256)(Problem)


class Operands(NamedTuple):
    """The arrays of a Problem, brought to one number of axes by their strides alone."""

    q: Tensor  # [num_tokens, head_num, head_size]
    k_cache: Tensor  # [num_blocks, block_size, kv_head_num, head_size]
    v_cache: Tensor  # [num_blocks, block_size, kv_head_num, head_size]
    # int32 [batch, max_block_num]; its owner is the caller's table, of any integer type
    block_tables: Tensor
    mask: Tensor | None  # None unless the kernel reads it
    # float32 [head_num]; None unless the kernel reads them; host memory for a list of numbers
    slopes: Tensor | None
    out: Tensor | None  # [num_tokens, head_num, head_size]


def static_problem(
    query: Any,
    key: Any,
    value: Any,
    block_tables: Any,
    *,
    mask: Any = None,
    slopes: Any = None,
    out: Any = None,
    mask_type: Any = "causal",
    head_num: Any = None,
    kv_head_num: Any = None,
    qk_scale: Any = 1.0,
    out_dtype: str | None = None,
    known_slopes: Tensor | None = None,
) -> tuple[Problem, Operands]:
    """Check and describe everything that needs no array's values (except those of the slopes).

    query: float16, bfloat16 or float32 [num_tokens, head_num * head_size] or [num_tokens, head_num,
    head_size].
    key, value: as query, [num_blocks, block_size, kv_head_num * head_size] or [..., kv_head_num,
    head_size].
    block_tables: integers [batch, max_block_num]; other types than int32 are copied to int32,
    misfits clipped.
    mask: query's dtype or float32, [256, 256] or [head_num, mask_len, 128] for an ALiBi kind;
    [128, 128] (never read) for CAUSAL_MASK.
    slopes: float32 [head_num] array, or a list or tuple of numbers; on query's device or the host.
    out: writable, as query, sharing no memory with an input. out_dtype: None for query's.
    known_slopes: checked before; on a GPU they are not read again.

    Raises TypeError and ValueError.
    """
    kind = mask_type if type(mask_type) is MaskType else MaskType.parse(mask_type)
    scale = _qk_scale(qk_scale)
    q = describe(query, "query")
    k_cache, v_cache = describe(key, "key"), describe(value, "value")
    if q.dtype not in FLOAT_DTYPES:
        raise TypeError(f"query: got dtype {q.dtype}, expected {', '.join(FLOAT_DTYPES)}")
    _like_query(k_cache, q)
    _like_query(v_cache, q)
    heads, kv_heads, head_size, num_blocks, block_size = _sizes(
        q.shape,
        k_cache.shape,
        v_cache.shape,
        None if head_num is None else as_int(head_num, "head_num"),
        None if kv_head_num is None else as_int(kv_head_num, "kv_head_num"),
    )
    table = _block_tables(describe(block_tables, "block_tables"), q.device)
    form, mask_t = ("none", None) if mask is None else _mask(describe(mask, "mask"), q, heads, kind)
    slopes_t = None
    if slopes is not None or (kind.is_alibi and mask is None):
        slopes_t = checked_slopes(slopes, q.device, heads, kind, known_slopes, is_positive=mask is None)
    if form == "heads":
        slopes_t = None
    out_t = (
        None
        if out is None
        else _out(describe(out, "out"), q, out_dtype or q.dtype, (q, k_cache, v_cache, table, mask_t, slopes_t))
    )
    problem = _problem(
        q.dtype, q.shape[0], table.shape[0], heads, kv_heads, head_size, num_blocks, block_size, table.shape[1],
        kind, form, None if mask_t is None else mask_t.dtype, mask_t.shape[1] if mask_t and form == "heads" else 0,
        slopes_t is not None, scale,
    )  # fmt: skip
    operands = Operands(
        _split_last_axis(q, heads, head_size) if len(q.shape) == 2 else q,
        _split_last_axis(k_cache, kv_heads, head_size) if len(k_cache.shape) == 3 else k_cache,
        _split_last_axis(v_cache, kv_heads, head_size) if len(v_cache.shape) == 3 else v_cache,
        table,
        mask_t,
        slopes_t,
        _split_last_axis(out_t, heads, head_size) if out_t is not None and len(out_t.shape) == 2 else out_t,
    )
    return problem, operands


def has_unit_stride(t: Tensor) -> bool:
    return t.strides[-1] == 1 or t.shape[-1] == 1 or 0 in t.shape


def unit_stride(t: Tensor) -> Tensor:
    """`t` itself if its last axis is dense, else the description of a dense private copy of its
    present values.

    Raises ValueError for memory on a GPU that belongs to neither torch nor an object with
    `copy(order="C")`.
    """
    if has_unit_stride(t):
        return t
    if t.device == "cpu":
        copy: Any = np.ascontiguousarray(bits(t))
        address = copy.ctypes.data
    elif t.kind == "torch":
        copy = (t.owner if t.keeper is None else t.keeper).detach().contiguous()
        address = copy.data_ptr()
    else:
        try:
            copy = describe(t.owner.copy(order="C"), t.name)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{t.name}: got stride {t.strides[-1]} on the last axis, expected 1") from error
        address = copy.address
    strides = contiguous_strides(t.shape)
    return Tensor(t.name, t.owner, t.kind, address, t.dtype, t.shape, strides, t.device, False, copy)


def _qk_scale(value: Any) -> float:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise TypeError(f"qk_scale: got {type(value).__name__}, expected a real number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not abs(value) <= MAX_QK_SCALE:
        raise ValueError(f"qk_scale: got {value}, expected a finite number of magnitude at most {MAX_QK_SCALE}")
    return float(value)


def as_int(value: Any, name: str) -> int:
    """An int or NumPy integer as int; TypeError for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    return operator.index(value)


def _like_query(t: Tensor, q: Tensor, dtype: str | None = None) -> None:
    expected = f"{q.dtype} (query's)" if dtype in (None, q.dtype) else dtype
    if t.dtype != (dtype or q.dtype):
        raise TypeError(f"{t.name}: got dtype {t.dtype}, expected {expected}")
    if t.device != q.device:
        raise ValueError(f"{t.name}: got an array on {t.device}, expected one on {q.device} (query's device)")


@lru_cache(maxsize=1024)
def _sizes(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    head_num: int | None,
    kv_head_num: int | None,
) -> tuple[int, int, int, int, int]:
    """head_num, kv_head_num, head_size, num_blocks, block_size."""
    heads, head_size = _query_heads(q_shape, head_num)
    if kv_head_num is None and len(k_shape) == 4:
        kv_heads = k_shape[2]
        if kv_heads < 1:
            raise ValueError(f"key: got shape {k_shape}, expected at least one head")
    else:
        kv_heads = kv_head_num or heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_head_num: got {kv_heads}, expected a divisor of head_num {heads}")
    for name, shape in (("key", k_shape), ("value", v_shape)):
        if shape[2:] not in ((kv_heads * head_size,), (kv_heads, head_size)) or shape[1] < 1:
            raise ValueError(
                f"{name}: got shape {shape}, expected [numBlocks, block_size, {kv_heads * head_size}] or "
                f"[numBlocks, block_size, {kv_heads}, {head_size}] (kv_head_num {kv_heads}, head size {head_size}) "
                "with block_size at least 1"
            )
    if v_shape[:2] != k_shape[:2]:
        raise ValueError(f"value: got shape {v_shape}, expected {k_shape[0]} blocks of {k_shape[1]} tokens (key's)")
    if max(k_shape[:2]) > INT32_MAX:
        raise ValueError(f"key: got shape {k_shape}, expected at most {INT32_MAX} blocks and tokens per block")
    return heads, kv_heads, head_size, k_shape[0], k_shape[1]


def _query_heads(shape: tuple[int, ...], heads: int | None) -> tuple[int, int]:
    """head_num and head_size."""
    if heads is not None and heads < 1:
        raise ValueError(f"head_num: got {heads}, expected at least 1")
    if len(shape) == 3:
        if heads not in (None, shape[1]):
            raise ValueError(f"head_num: got {heads}, expected {shape[1]} (query has shape {shape})")
        heads, head_size = shape[1:]
        if heads < 1:
            raise ValueError(f"query: got shape {shape}, expected at least one head")
    elif len(shape) == 2:
        if heads is None:
            raise ValueError(f"head_num: got None, expected an int, since query is 2-D (shape {shape})")
        head_size, rest = divmod(shape[1], heads)
        if rest:
            raise ValueError(f"query: got {shape[1]} columns, expected a multiple of head_num {heads}")
    else:
        expected = "[nTokens, head_num*head_size] or [nTokens, head_num, head_size]"
        raise ValueError(f"query: got shape {shape}, expected {expected}")
    if not 1 <= head_size <= MAX_HEAD_SIZE:
        raise ValueError(f"query: got head size {head_size}, expected 1 to {MAX_HEAD_SIZE}")
    return heads, head_size


def _split_last_axis(t: Tensor, heads: int, head_size: int) -> Tensor:
    step = t.strides[-1]
    shape = (*t.shape[:-1], heads, head_size)
    strides = (*t.strides[:-1], head_size * step, step)
    return Tensor(t.name, t.owner, t.kind, t.address, t.dtype, shape, strides, t.device, t.is_writable, t.keeper)


def _block_tables(t: Tensor, device: str) -> Tensor:
    if t.dtype not in INTEGER_DTYPES:
        raise TypeError(f"block_tables: got dtype {t.dtype}, expected int32 or another integer dtype")
    if t.ndim != 2:
        raise ValueError(f"block_tables: got shape {t.shape}, expected [batch, maxBlockNum]")
    if t.device != device:
        raise ValueError(f"block_tables: got an array on {t.device}, expected one on {device} (query's device)")
    return t if t.dtype == "int32" else _clip_to_int32(t)


def _clip_to_int32(t: Tensor) -> Tensor:
    """A table of another integer type as int32. A value that doesn't fit becomes an id that is out
    of range for any cache."""
    if t.device == "cpu":
        source = as_numpy(t)
        info = np.iinfo(source.dtype)
        copy: Any = np.empty(t.shape, np.int32)
        np.clip(source, max(info.min, INT32_MIN), min(info.max, INT32_MAX), out=copy, casting="unsafe")
        address = copy.ctypes.data
    elif t.kind == "torch" and not t.dtype.startswith("uint"):
        wide = t.owner.long().clamp(INT32_MIN, INT32_MAX)
        copy = wide.int().contiguous()
        address = copy.data_ptr()
    else:
        raise TypeError(f"block_tables: got dtype {t.dtype} on {t.device}, expected int32")
    strides = contiguous_strides(t.shape)
    return Tensor(t.name, t.owner, t.kind, address, "int32", t.shape, strides, t.device, False, copy)


def _mask(t: Tensor, q: Tensor, heads: int, kind: MaskType) -> tuple[str, Tensor | None]:
    """The mask's form, and the mask if the kernel reads it."""
    if kind is MaskType.NONE:
        raise ValueError(f"mask: got an array of shape {t.shape}, expected None with mask_type NONE")
    if t.dtype not in (q.dtype, "float32"):
        expected = q.dtype if q.dtype == "float32" else f"{q.dtype} (query's) or float32"
        raise TypeError(f"mask: got dtype {t.dtype}, expected {expected}")
    if kind is MaskType.CAUSAL_MASK:
        if t.shape != NORM_TEMPLATE_SHAPE:
            raise ValueError(f"mask: got shape {t.shape}, expected None or (128, 128) with mask_type CAUSAL_MASK")
        return "none", None
    if t.device != q.device:
        raise ValueError(f"mask: got an array on {t.device}, expected one on {q.device} (query's device)")
    if t.shape == TEMPLATE_SHAPE:
        return "template", t
    if t.ndim == 3 and t.shape[0] == heads and t.shape[2] == HEADS_MASK_COLUMNS:
        return "heads", t
    raise ValueError(f"mask: got shape {t.shape}, expected (256, 256) or ({heads}, maskLen, {HEADS_MASK_COLUMNS})")


def _out(t: Tensor, q: Tensor, dtype: str, inputs: tuple[Tensor | None, ...]) -> Tensor:
    _like_query(t, q, dtype)
    if t.shape != q.shape:
        raise ValueError(f"out: got shape {t.shape}, expected {q.shape} (query's)")
    if t.is_copy:
        raise ValueError("out: got a misaligned array, expected elements at multiples of their size")
    if not t.is_writable:
        raise ValueError("out: got a read-only array, expected a writable one")
    if 0 in t.strides and 0 not in t.shape and any(n > 1 for s, n in zip(t.strides, t.shape, strict=True) if s == 0):
        raise ValueError(f"out: got strides {t.strides}, expected an array whose elements don't share memory")
    for other in inputs:
        if other is not None and overlaps(t, other):
            raise ValueError(f"out: got memory shared with {other.name}, expected memory of its own")
    return t
