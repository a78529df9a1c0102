"""Path `avx512_bf16`: the micro-kernels of path `vector` on pairs of bfloat16, two products an instruction (vdpbf16ps)."""

from __future__ import annotations

from typing import Any

from numba_prefix.cpu.compile.jit import part
from numba_prefix.cpu.kernel.prefill_bf16 import column_acc, column_q
from numba_prefix.cpu.kernel.prefill_bf16_pack import join_rows
from numba_prefix.cpu.kernel.prefill_bf16_softmax import NUM_UNITS, weigh_unit
from numba_prefix.cpu.kernel.prefill_f32_gemm import MR, finish_output, finish_scores, make_product
from numba_prefix.cpu.kernel.sizes import FLOAT, PAIR_DIMS, PANEL_P_BYTES, PANEL_S_BYTES, STEP_N, STRIP, VECTOR_BYTES
from numba_prefix.cpu.simd.bf16_pairs import dot_pairs
from numba_prefix.cpu.simd.memory import load1_i64
from numba_prefix.rules.tiling import ceil_div, round_up

score_product, score_product_1 = (make_product(columns, finish_scores, dot_pairs) for columns in (STRIP, 1))
output_product, output_product_1 = (make_product(columns, finish_output, dot_pairs) for columns in (STRIP, 1))


@part
def pack_values(params: Any, is_clean: Any, rows: Any, num_keys: Any, scratch: Any) -> Any:
    """V_ROWS as [pair of keys][dimension][2]; whether there are infinities or NaN, which become 0 if is_clean."""
    is_special = False
    for j in range(ceil_div(num_keys, 2)):
        target = scratch + params.v_rows_offset + j * params.v_pitch
        first, second = load1_i64(rows + 16 * j), load1_i64(rows + 16 * j + 8)
        if join_rows(params, is_clean, first, second, target, scratch + params.staging_offset):
            is_special = True
    return is_special


@part
def scale_acc(params: Any, acc: Any, alpha: Any) -> None:
    """The output product does it."""


@part
def step(params: Any, scoring: Any, weighing: Any, adding: Any, scratch: Any) -> None:
    keys, q_t, width, s = scoring
    pitch, num_pairs = params.k_pitch, round_up(params.head_size, PAIR_DIMS) // 2
    for j in range(0, STEP_N if width > 0 else 0, MR):
        if width == 1:
            score_product_1(
                keys + j * pitch, pitch, q_t, column_q(params), num_pairs, s + j * VECTOR_BYTES, PANEL_S_BYTES, 0
            )
        else:
            score_product(
                keys + j * pitch, pitch, q_t, column_q(params), num_pairs, s + j * VECTOR_BYTES, PANEL_S_BYTES, 0
            )
    for unit in range(load1_i64(weighing + NUM_UNITS)):
        weigh_unit(weighing, unit)
    key, p, num_keys, first, end, width, acc, alpha = adding
    pitch, num_pairs = params.v_pitch, ceil_div(num_keys, 2)
    v_rows = scratch + params.v_rows_offset + (key >> 1) * pitch
    for i in range(first, end, MR):
        if width == 1:
            output_product_1(
                v_rows + FLOAT * i,
                pitch,
                p,
                PANEL_P_BYTES,
                num_pairs,
                acc + i * VECTOR_BYTES,
                column_acc(params),
                alpha,
            )
        else:
            output_product(
                v_rows + FLOAT * i,
                pitch,
                p,
                PANEL_P_BYTES,
                num_pairs,
                acc + i * VECTOR_BYTES,
                column_acc(params),
                alpha,
            )
