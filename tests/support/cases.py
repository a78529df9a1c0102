"""Ragged paged problems with known contents; functions that run them on any target and judge the
results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

import numba_prefix as nbp
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.reference.oracle import budget, naive, reference

DTYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
ALIBI = ("alibi", "alibi_sqrt", "alibi_left_align")
INT_MAX = 2**31 - 1
FEW_NUMBERS = 16
# Two float64 evaluations of one formula differ by rounding only: about (number of keys) * 2e-16,
# relative.
FLOAT64_TOLERANCE = 1e-12

Filler = Callable[[int, np.ndarray, np.ndarray, np.ndarray], Any]


@dataclass(frozen=True)
class Case:
    """One problem: the logical K/V of each sequence, and the same in a paged cache."""

    query: np.ndarray  # [num_tokens, head_num, head_size]
    keys: tuple[np.ndarray, ...]  # per sequence [kv_len, kv_head_num, head_size]
    values: tuple[np.ndarray, ...]
    key: np.ndarray  # [num_blocks, block_size, kv_head_num, head_size]
    value: np.ndarray
    block_tables: np.ndarray  # int32 [batch, max_block_num]
    seq_len: tuple[int, ...]
    kv_seq_len: tuple[int, ...]
    mask_type: Any = "causal"
    mask: np.ndarray | None = None
    slopes: np.ndarray | None = None
    qk_scale: float = 1.0

    @property
    def starts(self) -> np.ndarray:
        """First row of each sequence in query, and the end."""
        return np.concatenate([[0], np.cumsum(self.seq_len)]).astype(int)

    @property
    def q_pos(self) -> np.ndarray:
        """Absolute position of every query row, packed as query is."""
        pairs = zip(self.seq_len, self.kv_seq_len, strict=True)
        return np.concatenate([np.arange(kv - q, kv) for q, kv in pairs] or [np.zeros(0, int)])

    def rows(self, out: Any, sequence: int) -> Any:
        return out[self.starts[sequence] : self.starts[sequence + 1]]

    def arguments(self) -> dict[str, Any]:
        names = ("query", "key", "value", "block_tables", "seq_len", "kv_seq_len", "mask_type", "mask", "slopes")
        return {name: getattr(self, name) for name in names} | {"qk_scale": self.qk_scale}


def _sequence(fill: Any, b: int, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if fill is None:
        return rng.standard_normal(shape)
    if callable(fill):
        j, h, c = np.ogrid[: shape[0], : shape[1], : shape[2]]
        fill = fill(b, j, h, c)
    return np.broadcast_to(np.asarray(fill, np.float64), shape)


def paged(
    sequences: Sequence[np.ndarray], block_size: int, *, tables: np.ndarray, num_blocks: int, poison: float
) -> np.ndarray:
    """Lay sequences out in the blocks that the tables name; every slot that is not addressed holds
    `poison`."""
    shape, dtype = sequences[0].shape[1:], sequences[0].dtype
    cache = np.full((num_blocks, block_size, *shape), poison, dtype)
    for b, sequence in enumerate(sequences):
        for column, start in enumerate(range(0, len(sequence), block_size)):
            part = sequence[start : start + block_size]
            cache[tables[b, column], : len(part)] = part
    return cache


def shuffled_tables(
    kv_seq_len: Sequence[int], block_size: int, rng: np.random.Generator, *, spare: int = 2, tail: int = 2
) -> tuple[np.ndarray, int]:
    """Tables over shuffled blocks with at least `tail` junk columns, and a block count with `spare`
    blocks unnamed."""
    counts = [-(-kv // block_size) for kv in kv_seq_len]
    num_blocks = sum(counts) + spare
    pages = iter(rng.permutation(num_blocks))
    junk = np.array([-1, INT_MAX, num_blocks, -(2**31), 0], np.int64)
    tables = rng.choice(junk, (len(counts), max(counts, default=0) + tail)).astype(np.int32)
    for b, count in enumerate(counts):
        tables[b, :count] = [next(pages) for _ in range(count)]
    return tables, num_blocks


def make_case(
    seq_len: Sequence[int],
    kv_seq_len: Sequence[int],
    *,
    head_num: int = 1,
    kv_head_num: int | None = None,
    head_size: int = 16,
    block_size: int = 16,
    dtype: str = "float32",
    seed: int = 0,
    query: Any = None,
    key: Filler | float | None = None,
    value: Filler | float | None = None,
    poison: float = np.nan,
    spare: int = 2,
    tail: int = 2,
    qk_scale: float | None = None,
    **extra: Any,
) -> Case:
    """A seeded problem. query: None (normal), a number or an array; key, value: also f(b, j,
    kv_head, column)."""
    rng = np.random.default_rng(seed)
    kv_head_num = kv_head_num or head_num
    to = DTYPES[dtype]
    q = _sequence(query, 0, (sum(seq_len), head_num, head_size), rng).astype(to)
    shapes = [(kv, kv_head_num, head_size) for kv in kv_seq_len]
    keys = tuple(_sequence(key, b, shape, rng).astype(to) for b, shape in enumerate(shapes))
    values = tuple(_sequence(value, b, shape, rng).astype(to) for b, shape in enumerate(shapes))
    tables, num_blocks = shuffled_tables(kv_seq_len, block_size, rng, spare=spare, tail=tail)
    nothing = np.zeros((0, kv_head_num, head_size), to)
    caches = [
        paged(part or (nothing,), block_size, tables=tables, num_blocks=num_blocks, poison=poison)
        for part in (keys, values)
    ]
    scale = head_size**-0.5 if qk_scale is None else qk_scale
    return Case(q, keys, values, *caches, tables, tuple(seq_len), tuple(kv_seq_len), qk_scale=scale, **extra)


def repaged(case: Case, *, seed: int, block_size: int | None = None, poison: float = np.nan, tail: int = 2) -> Case:
    """The same logical problem in other blocks."""
    size = block_size or case.key.shape[1]
    tables, num_blocks = shuffled_tables(case.kv_seq_len, size, np.random.default_rng(seed), spare=3, tail=tail)
    kinds = {"tables": tables, "num_blocks": num_blocks, "poison": poison}
    nothing = case.key.reshape(-1, *case.key.shape[2:])[:0]
    return replace(
        case,
        key=paged(case.keys or (nothing,), size, **kinds),
        value=paged(case.values or (nothing,), size, **kinds),
        block_tables=tables,
    )


def select(case: Case, order: Sequence[int]) -> Case:
    """The sequences of `order` only, in that order, in the same cache."""
    pick = [case.rows(case.query, b) for b in order]
    return replace(
        case,
        query=np.concatenate(pick) if pick else case.query[:0],
        keys=tuple(case.keys[b] for b in order),
        values=tuple(case.values[b] for b in order),
        block_tables=case.block_tables[list(order)],
        seq_len=tuple(case.seq_len[b] for b in order),
        kv_seq_len=tuple(case.kv_seq_len[b] for b in order),
    )


def chunk(case: Case, begin: int, end: int) -> Case:
    """Query rows begin..end of the only sequence, over the keys present once those rows are
    written."""
    (q_len,), (kv_len,) = case.seq_len, case.kv_seq_len
    kv = kv_len - q_len + end
    return replace(
        case,
        query=case.query[begin:end],
        keys=(case.keys[0][:kv],),
        values=(case.values[0][:kv],),
        seq_len=(end - begin,),
        kv_seq_len=(kv,),
    )


def repeated_heads(case: Case) -> Case:
    """The multi-head problem equivalent to a grouped one."""
    group = case.query.shape[1] // case.key.shape[2]
    return replace(
        case,
        keys=tuple(np.repeat(k, group, 1) for k in case.keys),
        values=tuple(np.repeat(v, group, 1) for v in case.values),
        key=np.repeat(case.key, group, 2),
        value=np.repeat(case.value, group, 2),
    )


def distance_template(mask_type: str) -> np.ndarray:
    """ATB's [256, 256] template without rounding: distance, its root, or the column; +inf where j >
    i."""
    i, j = np.ogrid[:256, :256]
    if mask_type == "alibi_left_align":
        return np.broadcast_to(j % 128, (256, 256)).astype(np.float32)
    distance = np.where(j > i, np.inf, np.abs(i - j).astype(np.float64))
    return (np.sqrt(distance) if mask_type == "alibi_sqrt" else distance).astype(np.float32)


def outweighed_infinity(infinite: int, leading: int, dtype: str = "float16") -> Case:
    """Four rows over 2060 keys, which targets split in two. Key `infinite` has an infinity in
    column 3 of its value, and key `leading` leads so far that all other weights, and the factor of
    the split without it, are 0 in float32."""

    def value(b: int, j: np.ndarray, h: np.ndarray, c: np.ndarray) -> np.ndarray:
        return np.where((j == infinite) & (c == 3), np.inf, 1.0 + 0 * (j + h + c))

    return make_case(
        [4], [2060], dtype=dtype, query=8.0, key=lambda b, j, h, c: 8.0 * (j == leading), value=value, qk_scale=1.0
    )


def with_mask(case: Case, form: str, seed: int = 0, mask_dtype: str = "float32") -> Case:
    """Add slopes or a random mask: form is "none", "causal", or KIND-generator, KIND-template,
    KIND-heads."""
    kind, _, how = form.partition("-")
    rng, heads, to = np.random.default_rng(seed), case.query.shape[1], DTYPES[mask_dtype]
    if not how:
        return replace(case, mask_type=kind)
    slopes = rng.uniform(0.0, 0.5, heads).astype(np.float32)
    if how == "generator":
        return replace(case, mask_type=kind, slopes=slopes)
    if how == "template":
        mask = (distance_template(kind) * rng.uniform(0.9, 1.1, (256, 256))).astype(to)
        return replace(case, mask_type=kind, slopes=slopes - np.float32(0.3), mask=mask)
    mask_len = max(case.kv_seq_len, default=0) + int(rng.integers(0, 9))
    return replace(case, mask_type=kind, mask=rng.standard_normal((heads, mask_len, 128)).astype(to))


MASK_FORMS = ("none", "causal", *(f"{kind}-{how}" for kind in ALIBI for how in ("generator", "template", "heads")))


def run(case: Case, target: str, /, **overrides: Any) -> Any:
    """The result of a target, with every argument by name; "cuda" runs on a fake GPU (cc, execute:
    see cuda_target)."""
    if target == "cuda":
        import cuda_target

        return cuda_target.run(case, **overrides)
    return nbp.prefix_encoder(**(case.arguments() | {"target": target} | overrides))


def bias_of(case: Case, head: int, p: int, j: np.ndarray) -> np.ndarray:
    """The bias of section 3 of tests/contract.md, word by word, in float64."""
    kind = MaskType.parse(case.mask_type)
    if kind in (MaskType.NONE, MaskType.CAUSAL_MASK):
        return np.zeros(len(j))
    slope = 1.0 if case.slopes is None else float(case.slopes[head])
    if case.mask is None:
        distance = (p - j).astype(np.float64)
        return {3: -slope * distance, 4: -slope * np.sqrt(distance), 5: slope * j}[int(kind)]
    mask = case.mask.astype(np.float64)
    if mask.ndim == 3:
        return mask[head, p - 128 * (j // 128), j % 128]
    m, r, n, c = p // 128, p % 128, j // 128, j % 128
    near, far, gap = mask[r, c], mask[128 + r, c], 128.0 * (m - n - 1)
    if kind is MaskType.ALIBI_COMPRESS:
        t = np.where(n == m, near, far + gap)
    elif kind is MaskType.ALIBI_COMPRESS_SQRT:
        t = np.where(n == m, near, np.sqrt(np.abs(far**2 + gap)))
    else:
        t = np.where(n == m, near, far) + 128.0 * n
    return slope * t


def brute(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The result (out, lse) in float64, one row after the other, over the keys that the row may
    see."""
    num_tokens, head_num, head_size = case.query.shape
    out, lse = np.zeros((num_tokens, head_num, head_size)), np.full((num_tokens, head_num), -np.inf)
    group = head_num // case.key.shape[2]
    is_causal = MaskType.parse(case.mask_type) is not MaskType.NONE
    for b, kv_len in enumerate(case.kv_seq_len):
        keys, values = case.keys[b].astype(np.float64), case.values[b].astype(np.float64)
        for row in range(case.starts[b], case.starts[b + 1]):
            p = kv_len - case.seq_len[b] + row - case.starts[b]
            j = np.arange(p + 1 if is_causal else kv_len)
            for h in range(head_num):
                score = case.qk_scale * (keys[j, h // group] @ case.query[row, h].astype(np.float64))
                score = score + bias_of(case, h, int(p), j)
                top = score.max() if len(j) else -np.inf
                if top == -np.inf:
                    continue
                weight = np.exp(score - top)
                out[row, h] = weight @ values[j, h // group] / weight.sum()
                lse[row, h] = top + np.log(weight.sum())
    return out, lse


_known: dict[bytes, Any] = {}


def once(what: Callable[..., Any], case: Case) -> Any:
    """Result of what(**arguments, return_lse=True), computed once per session for one set of
    inputs."""
    digest = hashlib.blake2b(f"{what.__name__}".encode())
    for name, value in case.arguments().items():
        array = value if isinstance(value, np.ndarray) else None
        digest.update(f"{name} {value if array is None else (array.shape, array.dtype)}".encode())
        digest.update(b"" if array is None else np.ascontiguousarray(array).view(np.uint8).tobytes())
    key = digest.digest()
    if key not in _known:
        _known[key] = what(**case.arguments(), return_lse=True)
    return _known[key]


def to_numpy(out: Any) -> np.ndarray:
    """A NumPy view of a result of any kind; bfloat16 as ml_dtypes.bfloat16."""
    if isinstance(out, np.ndarray):
        return out
    if str(out.dtype) == "torch.bfloat16":
        import torch

        return out.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return out.detach().numpy() if hasattr(out, "detach") else np.from_dlpack(out)


def naming(*patterns: Any) -> str:
    """A pattern for pytest.raises(match=...): all the given texts occur, numbers as whole numbers,
    in any order."""
    parts = [rf"(?<![\w-]){p}(?!\w)" if isinstance(p, int) else f"(?:{p})" for p in patterns]
    return "(?s)^" + "".join(f"(?=.*{p})" for p in parts)


def bits(out: Any) -> np.ndarray:
    array = np.ascontiguousarray(to_numpy(out))
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


def same_bits(a: Any, b: Any) -> None:
    assert to_numpy(a).dtype == to_numpy(b).dtype
    np.testing.assert_array_equal(bits(a), bits(b))


def assert_near(out: Any, expected: Any) -> None:
    """Assert that all values are within 4 eps(out) of the largest expected value: the tolerance
    with 1 eps for its naive part.

    2 eps were too few for sums over tiles of 128 keys: 2.2 eps were measured (132 keys of weight
    1/3, float32), where a plain sum in float32 is no nearer.
    """
    out = to_numpy(out)
    expected = np.broadcast_to(np.asarray(expected, np.float64), out.shape)
    allowed = 4 * float(ml_dtypes.finfo(out.dtype).eps) * np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0, atol=max(allowed, 1e-30))


def assert_value(out: Any, expected: Any) -> None:
    """Assert equality with `expected`, a value of the output's dtype that sums of whole numbers
    give: 16-bit results must hit it."""
    out = to_numpy(out)
    if out.itemsize > 2:
        return assert_near(out, expected)
    expected = np.broadcast_to(np.asarray(expected, np.float64), out.shape)
    np.testing.assert_array_equal(expected.astype(out.dtype).astype(np.float64), expected)
    np.testing.assert_array_equal(out.astype(np.float64), expected)
    return None


def judge(out: Any, ref: np.ndarray, plain: Any, what: str) -> None:
    out = to_numpy(out)
    assert out.shape == ref.shape, (what, out.shape, ref.shape)
    result = budget(out, ref, plain)
    # The mean of few numbers is not tested: a single lse reached 1.07 of the mean allowed, within
    # the largest allowed.
    is_mean_judged = out.size >= FEW_NUMBERS
    assert result.ok or (not is_mean_judged and result.max_error <= result.max_allowed), f"{what}: {result}"


def assert_close(out: Any, case: Case, lse: Any = None) -> None:
    """Assert the house tolerance against the oracle."""
    ref, ref_lse = once(reference, case)
    plain, plain_lse = once(naive, case)
    out = to_numpy(out)
    judge(out, ref.reshape(out.shape), np.asarray(plain).reshape(out.shape), "out")
    if lse is not None:
        assert to_numpy(lse).dtype == np.float32
        judge(lse, ref_lse, plain_lse, "lse")


def assert_oracle(case: Case) -> None:
    """Assert that the oracle agrees with brute force, both in float64."""
    for got, want in zip(once(reference, case), brute(case), strict=True):
        scale = np.abs(want[np.isfinite(want)]).max(initial=0.0)
        np.testing.assert_allclose(got, want, rtol=0, atol=FLOAT64_TOLERANCE * max(scale, 1.0))


def check(case: Case, target: str) -> Any:
    """Run with lse, judge both, return out."""
    if target == "reference":
        assert_oracle(case)
    out, lse = run(case, target, return_lse=True)
    assert_close(out, case, lse)
    return out
