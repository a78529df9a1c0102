"""The slopes of a call: one coefficient for each query head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import Tensor, as_numpy, describe
from numba_prefix.inputs.mask_types import MaskType


def checked_slopes(
    slopes: Any, device: str, heads: int, kind: MaskType, known: Tensor | None, *, is_positive: bool
) -> Tensor:
    """The slopes, described and checked. known: slopes that were checked before, which on a GPU are
    not read again."""
    if slopes is None:
        raise ValueError(f"slopes: got None, expected float32 [{heads}] with mask_type {kind.name} and no mask")
    if not kind.is_alibi:
        raise ValueError(f"slopes: got slopes, expected None with mask_type {kind.name} (only ALiBi kinds use them)")
    t = described_slopes(slopes)
    if t.dtype != "float32":
        raise TypeError(f"slopes: got dtype {t.dtype}, expected float32")
    if t.shape != (heads,):
        raise ValueError(f"slopes: got shape {t.shape}, expected ({heads},), one per query head")
    if t.device not in (device, "cpu"):
        raise ValueError(f"slopes: got an array on {t.device}, expected one on {device} (query's device) or on the CPU")
    if t.device != "cpu" and known is not None and t.owner is known.owner:
        return t
    values = slope_values(t)
    if not all(map(math.isfinite, values)):
        head, value = next((h, v) for h, v in enumerate(values) if not math.isfinite(v))
        raise ValueError(f"slopes: got {value} for head {head}, expected finite numbers")
    if is_positive and min(values) < 0:
        head, value = next((h, v) for h, v in enumerate(values) if v < 0)
        raise ValueError(
            f"slopes: got {value} for head {head}, expected numbers >= 0: without a mask these are the paper's "
            "positive slopes, which the kernel negates"
        )
    return t


def described_slopes(slopes: Any) -> Tensor:
    """A list's or tuple's numbers as float32, or an array as it is."""
    return describe(_slopes_array(slopes) if isinstance(slopes, (list, tuple)) else slopes, "slopes")


def _slopes_array(slopes: list[Any] | tuple[Any, ...]) -> NDArray[np.float32]:
    for head, slope in enumerate(slopes):
        if isinstance(slope, bool) or not isinstance(slope, (int, float, np.integer, np.floating)):
            raise TypeError(f"slopes: got {type(slope).__name__} for head {head}, expected a real number")
    with np.errstate(over="ignore"):
        try:
            return np.array(slopes, np.float64).astype(np.float32)
        except OverflowError:
            raise ValueError("slopes: got an integer too large for float32, expected finite numbers") from None


def slope_values(t: Tensor) -> list[float]:
    """The slopes' values; for slopes on a GPU this waits for the device."""
    if t.device == "cpu":
        return list(as_numpy(t).tolist())
    read = getattr(t.owner, "tolist", None) or getattr(t.owner, "copy_to_host", None)
    if read is None:
        raise TypeError(f"slopes: got {type(t.owner).__name__} on {t.device}, expected slopes on the CPU")
    return [float(v) for v in read()]
