"""The running softmax, written once for every target (Milakov & Gimelshein 2018; FlashAttention-2,
section 3.1).

State per row: `m_i` running max (starts at -inf), `l_i` running sum and `acc` weighted values
(start at 0). Infinities are real: no finite stand-in for -inf may win over a finite score.

Scores may come in any positive unit, because a scale without a bias need not be multiplied into
each of them. `unit` is a score of 1 in natural logarithms, `unit_log2` the same in base 2.
Differences are taken before the unit is applied, so that large scores keep their last bits and the
largest has probability exactly 1 before it is normalised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.rules.elementwise import F32_NEG_INF, F32_ZERO, exp2_scaled, log2, maximum, multiply_add, where

LOG2_E = np.float32(1.4426950408889634)
LN_2 = np.float32(0.6931471805599453)


def running_max(m_i: Any, score: Any) -> Any:
    """The larger of the two; a NaN score does not enter the max, but its probability is NaN."""
    return maximum(m_i, score)


def shift_of(m_i: Any) -> Any:
    """The offset subtracted from scores: the max, or 0 while every score was -inf (-inf - -inf
    would be NaN)."""
    return where(m_i == F32_NEG_INF, F32_ZERO, m_i)


def rescale(m_old: Any, shift: Any, unit_log2: Any) -> Any:
    """`alpha`: the factor that takes l_i and acc from the old max to the new; 0 for an empty
    state."""
    return exp2_scaled(m_old - shift, unit_log2)


def exp_score(score: Any, shift: Any, unit_log2: Any) -> Any:
    """A probability that is not yet divided by the sum of its row."""
    return exp2_scaled(score - shift, unit_log2)


def add_part(total: Any, acc: Any, alpha: Any) -> Any:
    """`total` plus the values of a split, brought to the common max by alpha.

    Where alpha underflows to 0, an infinity among the values becomes NaN, as it does where a
    probability underflows: it reaches every row that may see it in either case.
    """
    return multiply_add(acc, alpha, total)


def part_of_output(out: Any, lse: Any, alpha: Any) -> Any:
    """The summand that one rank's output, over its keys, adds to the merged output; 0 if its lse is
    -inf, whatever `out` holds."""
    return where(lse == F32_NEG_INF, F32_ZERO, out * alpha)


def normalize(acc: Any, l_i: Any) -> Any:
    """The output; 0 for a row without a score above -inf. A division, so that equal values average
    to themselves exactly."""
    return where(l_i == F32_ZERO, F32_ZERO, acc / l_i)


def log_sum_exp(m_i: Any, l_i: Any, unit: Any) -> Any:
    """Natural log-sum-exp; -inf for a row without a score above -inf."""
    return where(l_i == F32_ZERO, F32_NEG_INF, shift_of(m_i) * unit + log2(l_i) * LN_2)
