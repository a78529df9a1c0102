"""agree.py TARGET [DTYPE…]: tiny problems of every kind against the oracle, beside a parallel
function of the host."""

from __future__ import annotations

import sys

from cases import DTYPES, MASK_FORMS, assert_oracle, check, make_case, with_mask
from hosts import bring_up

bring_up()
for dtype in sys.argv[2:] or DTYPES:
    for form in MASK_FORMS:
        case = make_case(
            [3, 0, 1, 20], [5, 4, 140, 20], head_num=4, kv_head_num=2, head_size=5, block_size=3, dtype=dtype
        )
        case = with_mask(case, form)
        assert_oracle(case)
        check(case, sys.argv[1])
