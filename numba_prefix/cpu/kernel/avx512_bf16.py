"""Path `avx512_bf16`: the micro-kernels of path `vector` on pairs of bfloat16, two products an instruction (vdpbf16ps)."""

from __future__ import annotations

from typing import Any

from numba_prefix.cpu.compile.jit import part
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.params import COLUMN_P, COLUMN_S, PAIR_DIMS, STEP_N, STRIP
from numba_prefix.cpu.kernel.prefill_bf16 import column_acc, column_q
from numba_prefix.cpu.kernel.prefill_bf16_pack import join_rows
from numba_prefix.cpu.kernel.prefill_bf16_softmax import NUM_UNITS, weigh_unit
from numba_prefix.cpu.kernel.prefill_f32_gemm import COLUMN_ROW, FLOAT, MR, finish_output, finish_scores, make_product
from numba_prefix.cpu.simd.bf16_pairs import dot_pairs
from numba_prefix.cpu.simd.memory import load1_i64
from numba_prefix.rules.tiling import ceil_div, round_up

score_product, score_product_1 = (make_product(columns, finish_scores, dot_pairs) for columns in (STRIP, 1))
output_product, output_product_1 = (make_product(columns, finish_output, dot_pairs) for columns in (STRIP, 1))


@part
def pack_values(call: Any, is_clean: Any, rows: Any, num_keys: Any, scratch: Any) -> Any:
    """V_ROWS as [pair of keys][dimension][2]; whether there are infinities or NaN, which become 0 if is_clean."""
    is_special = False
    for j in range(ceil_div(num_keys, 2)):
        target = scratch + call[c.V_ROWS] + j * call[c.V_PITCH]
        first, second = load1_i64(rows + 16 * j), load1_i64(rows + 16 * j + 8)
        if join_rows(call, is_clean, first, second, target, scratch + call[c.ROWS]):
            is_special = True
    return is_special


@part
def scale_acc(call: Any, acc: Any, alpha: Any) -> None:
    """The output product does it."""


@part
def step(call: Any, scoring: Any, weighing: Any, adding: Any, scratch: Any) -> None:
    keys, q_t, width, s = scoring
    pitch, num_pairs = call[c.K_PITCH], round_up(call[c.HEAD_SIZE], PAIR_DIMS) // 2
    for j in range(0, STEP_N if width > 0 else 0, MR):
        if width == 1:
            score_product_1(keys + j * pitch, pitch, q_t, column_q(call), num_pairs, s + j * COLUMN_ROW, COLUMN_S, 0)
        else:
            score_product(keys + j * pitch, pitch, q_t, column_q(call), num_pairs, s + j * COLUMN_ROW, COLUMN_S, 0)
    for unit in range(load1_i64(weighing + NUM_UNITS)):
        weigh_unit(weighing, unit)
    key, p, num_keys, first, end, width, acc, alpha = adding
    pitch, num_pairs = call[c.V_PITCH], ceil_div(num_keys, 2)
    v_rows = scratch + call[c.V_ROWS] + (key >> 1) * pitch
    for i in range(first, end, MR):
        if width == 1:
            output_product_1(
                v_rows + FLOAT * i, pitch, p, COLUMN_P, num_pairs, acc + i * COLUMN_ROW, column_acc(call), alpha
            )
        else:
            output_product(
                v_rows + FLOAT * i, pitch, p, COLUMN_P, num_pairs, acc + i * COLUMN_ROW, column_acc(call), alpha
            )
