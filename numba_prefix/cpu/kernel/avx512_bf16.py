"""Path `avx512_bf16`: the micro-kernels of path `vector` on pairs of bfloat16, two products an
instruction (vdpbf16ps)."""

from __future__ import annotations

from typing import Any

from numba_prefix.cpu.compile.jit import device_function
from numba_prefix.cpu.kernel.prefill_bf16 import panel_acc_bytes, panel_q_bytes
from numba_prefix.cpu.kernel.prefill_bf16_pack import join_rows
from numba_prefix.cpu.kernel.prefill_bf16_softmax import NUM_CHUNKS, exp_chunk
from numba_prefix.cpu.kernel.prefill_f32_gemm import MR, finish_output, finish_scores, make_product
from numba_prefix.cpu.kernel.sizes import FLOAT, PAIR_DIMS, PANEL_P_BYTES, PANEL_S_BYTES, STEP_N, STRIP, VECTOR_BYTES
from numba_prefix.cpu.simd.bf16_pairs import dot_pairs
from numba_prefix.cpu.simd.memory import load1_i64
from numba_prefix.rules.tiling import ceil_div, round_up

score_product, score_product_1 = (make_product(panels, finish_scores, dot_pairs) for panels in (STRIP, 1))
output_product, output_product_1 = (make_product(panels, finish_output, dot_pairs) for panels in (STRIP, 1))


@device_function
def pack_values(params: Any, is_clean: Any, list_ptr: Any, num_keys: Any, scratch_ptr: Any) -> Any:
    """Packs listed value rows as [pair of keys][dimension][2]; returns whether there are infinities
    or NaN, which become 0 if is_clean."""
    is_non_finite = False
    for j in range(ceil_div(num_keys, 2)):
        target_ptr = scratch_ptr + params.v_rows_offset + j * params.v_pitch
        first_ptr, second_ptr = load1_i64(list_ptr + 16 * j), load1_i64(list_ptr + 16 * j + 8)
        if join_rows(params, is_clean, first_ptr, second_ptr, target_ptr, scratch_ptr + params.staging_offset):
            is_non_finite = True
    return is_non_finite


@device_function
def scale_acc(params: Any, acc_ptr: Any, alpha_ptr: Any) -> None:
    """Nothing: the output product does it."""


@device_function
def step(params: Any, scoring: Any, softmax_ptr: Any, adding: Any, scratch_ptr: Any) -> None:
    keys_ptr, q_t_ptr, width, s_ptr = scoring
    pitch, panel_q, num_pairs = params.k_pitch, panel_q_bytes(params), round_up(params.head_size, PAIR_DIMS) // 2
    for j in range(0, STEP_N if width > 0 else 0, MR):
        k_ptr, to_ptr = keys_ptr + j * pitch, s_ptr + j * VECTOR_BYTES
        if width == 1:
            score_product_1(k_ptr, pitch, q_t_ptr, panel_q, num_pairs, to_ptr, PANEL_S_BYTES, 0)
        else:
            score_product(k_ptr, pitch, q_t_ptr, panel_q, num_pairs, to_ptr, PANEL_S_BYTES, 0)
    for chunk in range(load1_i64(softmax_ptr + NUM_CHUNKS)):
        exp_chunk(softmax_ptr, chunk)
    key, p_ptr, num_keys, first, end, width, acc_ptr, alpha_ptr = adding
    pitch, panel_acc, num_pairs = params.v_pitch, panel_acc_bytes(params), ceil_div(num_keys, 2)
    v_rows_ptr = scratch_ptr + params.v_rows_offset + (key >> 1) * pitch
    for i in range(first, end, MR):
        v_ptr, to_ptr = v_rows_ptr + FLOAT * i, acc_ptr + i * VECTOR_BYTES
        if width == 1:
            output_product_1(v_ptr, pitch, p_ptr, PANEL_P_BYTES, num_pairs, to_ptr, panel_acc, alpha_ptr)
        else:
            output_product(v_ptr, pitch, p_ptr, PANEL_P_BYTES, num_pairs, to_ptr, panel_acc, alpha_ptr)
