"""Mask kinds by number and name, and the slopes and templates that ALiBi kinds take."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

# ATB's compressed template is built from 128 x 128 blocks, whatever the size of our tiles.
TEMPLATE_BLOCK = 128
TEMPLATE_SIZE = 2 * TEMPLATE_BLOCK


class MaskType(IntEnum):
    """Mask kinds, numbered as on the operator's own page (ATB's C++ header numbers them
    differently)."""

    NONE = 0
    ALIBI_COMPRESS = 3
    ALIBI_COMPRESS_SQRT = 4
    ALIBI_COMPRESS_LEFT_ALIGN = 5
    CAUSAL_MASK = 9

    @property
    def is_alibi(self) -> bool:
        return self in (
            MaskType.ALIBI_COMPRESS,
            MaskType.ALIBI_COMPRESS_SQRT,
            MaskType.ALIBI_COMPRESS_LEFT_ALIGN,
        )

    @classmethod
    def parse(cls, value: Any) -> MaskType:
        """A MaskType from a member, its number, or a name (any case) as this package, ATB or
        torch_npu spell it.

        Raises TypeError for another type, ValueError (listing what is accepted) for an unknown
        number or name.
        """
        if type(value) is cls:
            return value
        if isinstance(value, str):
            member = _NAMES.get(value.lower())
            if member is not None:
                return member
        elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            if int(value) in cls._value2member_map_:
                return cls(int(value))
        else:
            raise TypeError(f"mask_type: got {type(value).__name__}, expected an int, a MaskType or a name")
        numbers = ", ".join(f"{m.value} {m.name}" for m in cls)
        raise ValueError(f"mask_type: got {value!r}, expected one of {numbers}, or a name of {', '.join(_NAMES)}")

    @classmethod
    def from_atb_header(cls, number: int) -> MaskType:
        """The kind that ATB's C++ header numbers `number` (3 NORM_COMPRESS, which is plain causal,
        4 ALIBI_COMPRESS, 5 ..._SQRT, 6 ..._LEFT_ALIGN, 9 CAUSAL_MASK; 0 NONE)."""
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
            raise TypeError(f"number: got {type(number).__name__}, expected an int")
        if int(number) not in _ATB_HEADER:
            raise ValueError(f"number: got {number}, expected one of {', '.join(map(str, _ATB_HEADER))}")
        return _ATB_HEADER[int(number)]


_NAMES = {
    "none": MaskType.NONE,
    "causal": MaskType.CAUSAL_MASK,
    "causal_mask": MaskType.CAUSAL_MASK,
    "mask_type_causal_mask": MaskType.CAUSAL_MASK,
    "norm_compress": MaskType.CAUSAL_MASK,
    "mask_type_norm_compress": MaskType.CAUSAL_MASK,
    "alibi": MaskType.ALIBI_COMPRESS,
    "alibi_compress": MaskType.ALIBI_COMPRESS,
    "mask_type_alibi_compress": MaskType.ALIBI_COMPRESS,
    "alibi_sqrt": MaskType.ALIBI_COMPRESS_SQRT,
    "alibi_compress_sqrt": MaskType.ALIBI_COMPRESS_SQRT,
    "mask_type_alibi_compress_sqrt": MaskType.ALIBI_COMPRESS_SQRT,
    "mask_type_alibi_compress_sort": MaskType.ALIBI_COMPRESS_SQRT,
    "alibi_left_align": MaskType.ALIBI_COMPRESS_LEFT_ALIGN,
    "alibi_compress_left_align": MaskType.ALIBI_COMPRESS_LEFT_ALIGN,
}

_ATB_HEADER = {
    0: MaskType.NONE,
    3: MaskType.CAUSAL_MASK,
    4: MaskType.ALIBI_COMPRESS,
    5: MaskType.ALIBI_COMPRESS_SQRT,
    6: MaskType.ALIBI_COMPRESS_LEFT_ALIGN,
    9: MaskType.CAUSAL_MASK,
}


def alibi_slopes(head_num: int) -> NDArray[np.float32]:
    """Positive slopes, float32 [head_num]: Press et al., "Train Short, Test Long" (2022), section
    3.

    A power of two n gets 2**(-8/n), 2**(-16/n), …; any other count takes those of the power of two
    below it and fills up with every other slope of the power of two above it, as the authors' code
    does.
    """
    if isinstance(head_num, bool) or not isinstance(head_num, (int, np.integer)):
        raise TypeError(f"head_num: got {type(head_num).__name__}, expected an int")
    if head_num < 1:
        raise ValueError(f"head_num: got {head_num}, expected at least 1")
    below = 1 << (int(head_num).bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / below) for i in range(int(head_num) - below)]
    return np.array(slopes, dtype=np.float32)


def alibi_mask(mask_type: Any, dtype: Any = np.float32) -> NDArray[Any]:
    """ATB's compressed template of an ALiBi kind: [256, 256] of `dtype` (float16, float32 or
    ml_dtypes.bfloat16).

    Rows 0…127 hold the block on the diagonal, rows 128…255 the block before it. Entries are
    distances i - j (or their square roots), to be used with negative slopes as ATB does; the
    left-aligned kind holds the column, for positive slopes. Above the diagonal ATB has +inf, which
    is never read. Raises ValueError for a kind without a template.
    """
    kind = MaskType.parse(mask_type)
    if not kind.is_alibi:
        raise ValueError(f"mask_type: got {kind.name}, expected an ALiBi kind")
    row, column = np.indices((TEMPLATE_SIZE, TEMPLATE_SIZE))
    if kind is MaskType.ALIBI_COMPRESS_LEFT_ALIGN:
        template = (column % TEMPLATE_BLOCK).astype(np.float64)
    else:
        template = np.maximum(row - column, 0).astype(np.float64)
        if kind is MaskType.ALIBI_COMPRESS_SQRT:
            template = np.sqrt(template)
    template[column > row] = math.inf
    return template.astype(np.dtype(dtype))
