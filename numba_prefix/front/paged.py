"""Writing new tokens into the paged cache, and merging attention over disjoint
key ranges."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.inputs.arrays import Tensor, as_numpy, bits, describe, empty_like, overlaps
from numba_prefix.inputs.problem import FLOAT_DTYPES
from numba_prefix.reference.oracle import stored
from numba_prefix.rules.elementwise import F32_ONE
from numba_prefix.rules.softmax import LOG2_E, exp_score, log_sum_exp, normalize, part_of_output, running_max, shift_of


def reshape_and_cache(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> None:
    """Write each token's key and value into its slot of the paged cache, in place.

    key, value              float16, bfloat16 or float32 [num_tokens, kv_head_num, head_size] (or
                            the last two joined)
    key_cache, value_cache  same dtype, writable, [num_blocks, block_size, kv_head_num, head_size]
                            (or the last two joined)
    slot_mapping            integers [num_tokens]: block * block_size + slot; -1 skips the token;
                            the later of two wins

    Raises TypeError and ValueError naming the argument, before anything is written.
    """
    slots = _slots(describe(slot_mapping, "slot_mapping"))
    k, v, to_k, to_v = (
        describe(x, n)
        for x, n in ((key, "key"), (value, "value"), (key_cache, "key_cache"), (value_cache, "value_cache"))
    )
    pairs = [_rows_and_cache(new, cache, slots.size) for new, cache in ((k, to_k), (v, to_v))]
    for new, cache in ((k, to_v), (v, to_k)):
        if overlaps(new, cache):
            raise ValueError(f"{cache.name}: got memory shared with {new.name}, expected them apart")
    (_, k_cache), (_, v_cache) = pairs
    if k_cache.shape[:2] != v_cache.shape[:2]:
        raise ValueError(f"value_cache: got {v_cache.shape[:2]} blocks and slots, expected {k_cache.shape[:2]} (key's)")
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    is_bad = (slots < -1) | (slots >= num_slots)
    if is_bad.any():
        token = int(is_bad.argmax())
        raise ValueError(f"slot_mapping: got {slots[token]} for token {token}, expected -1 to {num_slots - 1}")
    kept = np.flatnonzero(slots >= 0)
    # The last of several tokens for one slot: NumPy leaves the order of repeated assignments open.
    _, last = np.unique(slots[kept][::-1], return_index=True)
    kept = kept[::-1][last]
    block, slot = np.divmod(slots[kept], max(1, k_cache.shape[1]))
    for rows, cache in pairs:
        cache[block, slot] = rows[kept].reshape(-1, *cache.shape[2:])


def _slots(t: Tensor) -> Any:
    if "int" not in t.dtype:
        raise TypeError(f"slot_mapping: got dtype {t.dtype}, expected integers")
    if t.ndim != 1:
        raise ValueError(f"slot_mapping: got shape {t.shape}, expected [num_tokens]")
    slots = as_numpy(t)
    return slots.astype(np.int64) if t.dtype != "uint64" else np.minimum(slots, np.iinfo(np.int64).max).astype(np.int64)


def _rows_and_cache(new: Tensor, cache: Tensor, num_tokens: int) -> tuple[Any, Any]:
    """NumPy bit views of the new rows and of the cache they go to."""
    if new.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{new.name}: got dtype {new.dtype}, expected {', '.join(FLOAT_DTYPES)}")
    if cache.dtype != new.dtype:
        raise TypeError(f"{cache.name}: got dtype {cache.dtype}, expected {new.dtype} ({new.name}'s)")
    if new.ndim not in (2, 3) or new.shape[0] != num_tokens:
        raise ValueError(f"{new.name}: got shape {new.shape}, expected [{num_tokens}, kv_head_num, head_size]")
    if cache.ndim not in (3, 4) or int(np.prod(cache.shape[2:])) != int(np.prod(new.shape[1:])):
        expected = f"[num_blocks, block_size, …] with {int(np.prod(new.shape[1:]))} elements a slot"
        raise ValueError(f"{cache.name}: got shape {cache.shape}, expected {expected}")
    if cache.ndim == 4 and new.ndim == 3 and cache.shape[2:] != new.shape[1:]:
        raise ValueError(f"{cache.name}: got {cache.shape[2:]} heads and head size, expected {new.shape[1:]}")
    if cache.device != "cpu" or new.device != "cpu":
        raise ValueError(f"{cache.name}: got memory on {cache.device} and {new.device}, expected CPU memory")
    if not cache.is_writable or cache.is_copy:
        raise ValueError(f"{cache.name}: got read-only memory, expected a writable cache")
    if overlaps(new, cache):
        raise ValueError(f"{cache.name}: got memory shared with {new.name}, expected them apart")
    return bits(new), bits(cache)


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Attention over two disjoint sets of keys as attention over both, from outputs and natural
    log-sum-exps.

    out_a, out_b  float16, bfloat16 or float32 [num_tokens, head_num, head_size] (or the last two
                  joined)
    lse_a, lse_b  float32 [num_tokens, head_num]; -inf for a row that saw nothing

    Returns (out, lse) of the caller's kind: out in out_a's dtype, lse float32. Raises TypeError and
    ValueError.
    """
    a, b, la, lb = (describe(x, n) for x, n in ((out_a, "out_a"), (out_b, "out_b"), (lse_a, "lse_a"), (lse_b, "lse_b")))
    _check_states(a, b, la, lb)
    sum_a, sum_b = as_numpy(la), as_numpy(lb)
    with np.errstate(invalid="ignore"):
        shift = shift_of(running_max(sum_a, sum_b))
        alpha_a, alpha_b = (exp_score(t, shift, LOG2_E) for t in (sum_a, sum_b))
    l_i = (alpha_a + alpha_b).astype(np.float32)
    heads = (*la.shape, a.shape[-1] if a.ndim == 3 else a.shape[1] // la.shape[1])
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        parts = ((a, sum_a, alpha_a), (b, sum_b, alpha_b))
        total = sum(
            part_of_output(_widened(t).reshape(heads), log_sum[..., None], alpha[..., None])
            for t, log_sum, alpha in parts
        )
        merged = normalize(total, l_i[..., None])
        lse = log_sum_exp(shift, l_i, F32_ONE)
    out = empty_like(a, a.shape, a.dtype)
    bits(describe(out, "out"))[...] = stored(merged.reshape(a.shape), a.dtype)
    lse_out = empty_like(la, la.shape, "float32")
    as_numpy(describe(lse_out, "lse"))[...] = lse
    return out, lse_out


def _widened(t: Tensor) -> Any:
    """float32 values; ml_dtypes need not be there."""
    if t.dtype == "bfloat16":
        return (bits(t).astype(np.uint32) << 16).view(np.float32)
    return as_numpy(t).astype(np.float32)


def _check_states(a: Tensor, b: Tensor, la: Tensor, lb: Tensor) -> None:
    if a.dtype not in FLOAT_DTYPES:
        raise TypeError(f"out_a: got dtype {a.dtype}, expected {', '.join(FLOAT_DTYPES)}")
    if b.dtype != a.dtype or b.shape != a.shape:
        raise (TypeError if b.dtype != a.dtype else ValueError)(
            f"out_b: got {b.dtype} {b.shape}, expected {a.dtype} {a.shape} (out_a's)"
        )
    if a.ndim not in (2, 3):
        raise ValueError(f"out_a: got shape {a.shape}, expected [num_tokens, head_num, head_size]")
    for t in (la, lb):
        if t.dtype != "float32":
            raise TypeError(f"{t.name}: got dtype {t.dtype}, expected float32")
        fits = t.ndim == 2 and t.shape[0] == a.shape[0]
        fits = fits and (t.shape[1] == a.shape[1] if a.ndim == 3 else t.shape[1] > 0 and a.shape[1] % t.shape[1] == 0)
        if not fits or t.shape != la.shape:
            raise ValueError(f"{t.name}: got shape {t.shape}, expected [num_tokens, head_num] of out_a {a.shape}")
    if any(t.device != "cpu" for t in (a, b, la, lb)):
        raise ValueError("out_a: got memory on a GPU, expected CPU memory")
