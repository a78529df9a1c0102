"""Places in a worker's scratch of one kv head: byte offsets and pitches by name
(params.py), and its size."""

from __future__ import annotations

from numba_prefix.cpu.kernel.params import OFFSETS
from numba_prefix.cpu.kernel.sizes import (
    BFLOAT,
    BLOCK_N,
    DECODE_N,
    FLOAT,
    LANES,
    PACK_N,
    PAIR_DIMS,
    PANEL_P_BYTES,
    PANEL_S_BYTES,
    STEP_N,
    STRIP,
    VECTOR_BYTES,
)
from numba_prefix.rules.tiling import MAX_FOLD_ROWS, round_up

Scratch = tuple[dict[str, int], int]
ADDRESS = 8  # bytes


def f32_scratch(head_size: int, tile_rows: int) -> Scratch:
    """Scratch for tiles of tile_rows rows that are computed in float32."""
    pitch = _row_pitch(head_size)
    return _placed(_sizes(head_size, tile_rows // LANES, pitch), {"row_pitch": pitch})


def decode_scratch(head_size: int) -> Scratch:
    """Scratch for decode tiles: the few rows of a sequence (tiling.fold_rows), whose keys and
    values are read where they lie."""
    pitch = _row_pitch(head_size)
    sizes = _sizes(head_size, 1, pitch) | {
        "q_t_offset": MAX_FOLD_ROWS * pitch,
        "k_rows_offset": 0,
        "v_rows_offset": 0,
        "s_offset": MAX_FOLD_ROWS * DECODE_N * FLOAT,
        "entries_offset": MAX_FOLD_ROWS * DECODE_N * FLOAT,
        "acc_offset": MAX_FOLD_ROWS * pitch,
        "staging_offset": 0,
        "k_list_offset": 2 * DECODE_N * ADDRESS,
        "v_list_offset": DECODE_N * ADDRESS,
    }
    return _placed(sizes, {"row_pitch": pitch})


def bf16_scratch(head_size: int, tile_rows: int, planes: int, is_by_dim: bool) -> Scratch:
    """Scratch for tiles of elements that are sums of `planes` bfloat16: 1 (bfloat16) or 2
    (float16).

    q_t      [panel][plane][pair of dimensions][16 rows][2]
    k_rows   [key][plane][dimension]
    v_rows   [plane][dimension][key] if is_by_dim, else [pair of keys][dimension][2]
    s        [buffer][panel of a strip][key][16 rows], float32
    p        [buffer][plane][panel of a strip][pair of keys][16 rows][2]
    """
    depth, dims = round_up(head_size, 16), round_up(head_size, PAIR_DIMS)
    panels = tile_rows // LANES
    v_pitch = (PACK_N * BFLOAT if is_by_dim else depth * 2 * BFLOAT) + 64
    pitches = {
        "row_pitch": _row_pitch(head_size),
        "planes": planes,
        "k_pitch": planes * dims * BFLOAT + 64,
        "v_pitch": v_pitch,
        "p_plane_bytes": STRIP * PANEL_P_BYTES,
        "v_plane_bytes": depth * v_pitch if is_by_dim else 0,
    }
    sizes = _sizes(head_size, panels, pitches["row_pitch"]) | {
        "q_t_offset": panels * planes * dims // 2 * VECTOR_BYTES,
        "k_rows_offset": PACK_N * pitches["k_pitch"],
        "v_rows_offset": planes * pitches["v_plane_bytes"] if is_by_dim else PACK_N // 2 * v_pitch,
        "s_offset": 2 * STRIP * PANEL_S_BYTES,
        "p_offset": 2 * planes * pitches["p_plane_bytes"],
        "staging_offset": STEP_N * pitches["k_pitch"],
        "k_list_offset": 2 * PACK_N * ADDRESS,
        "v_list_offset": 2 * PACK_N * ADDRESS,
        "zero_row_offset": depth * BFLOAT + 64,
        "non_finite_offset": 64,
        "softmax_offset": (1 + 4 * STRIP) * VECTOR_BYTES,
    }
    return _placed(sizes, pitches)


def _row_pitch(head_size: int) -> int:
    """A float32 row and one cache line: rows a power of two apart would share few cache sets."""
    return round_up(head_size, 16) * FLOAT + 64


def _sizes(head_size: int, panels: int, pitch: int) -> dict[str, int]:
    """Bytes of what all tile loops have."""
    from numba_prefix.cpu.simd.features import register_block  # brings Numba

    _, strip = register_block()
    depth = round_up(head_size, 16)
    per_row = dict.fromkeys(
        ("alpha_offset", "slopes_offset", "q_pos_offset", "bias_pos_offset", "begin_offset", "end_offset"),
        panels * VECTOR_BYTES,
    )
    return per_row | {
        "q_t_offset": panels * depth * VECTOR_BYTES,
        "k_rows_offset": BLOCK_N * pitch,
        "v_rows_offset": BLOCK_N * pitch,
        "s_offset": strip * BLOCK_N * VECTOR_BYTES,
        "entries_offset": BLOCK_N * VECTOR_BYTES,
        "acc_offset": panels * depth * VECTOR_BYTES,
        "state_offset": 2 * panels * VECTOR_BYTES,
        "mask_base_offset": 2 * panels * VECTOR_BYTES,
        "staging_offset": 16 * pitch,
        "k_list_offset": 2 * BLOCK_N * ADDRESS,
        "v_list_offset": BLOCK_N * ADDRESS,
        "kv_lane_offset": VECTOR_BYTES,
    }


def _placed(sizes: dict[str, int], pitches: dict[str, int]) -> Scratch:
    """Offsets in the order of params.OFFSETS, each at a multiple of 64 bytes."""
    placed, place = dict(pitches), 0
    for name in OFFSETS:
        if name in sizes:
            placed[name] = place
            place += round_up(sizes[name], 64)
    return placed, place
