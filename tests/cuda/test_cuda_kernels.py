"""The CUDA kernels: compiled for several generations of GPUs, interpreted, and held against the
oracle."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

import cuda_target
from cases import DTYPES, MASK_FORMS, Case, assert_close, make_case, outweighed_infinity, run, with_mask
from cuda_target import CCS
from ptx import Fault, InFlight, Memory, SharedRace
from ptx.device import Launched, interpreted

from numba_prefix.cuda.kernel.spec import KernelSpec
from numba_prefix.planning import work
from numba_prefix.rules import tiling

NAMES = [f"{major}.{minor}" for major, minor in CCS]
RAGGED = ([5, 0, 33, 1], [21, 7, 150, 70])


# Compiling takes most of the time: all kinds once, for others those that differ in more than a
# bias; and one dtype a head size.
SOME_FORMS = ("none", "causal", "alibi_sqrt-generator", "alibi_left_align-template", "alibi-heads")
KINDS = [((8, 0), form) for form in MASK_FORMS] + [((7, 5), form) for form in SOME_FORMS]
KINDS += [((9, 0), form) for form in SOME_FORMS[1::2]] + [((12, 0), form) for form in SOME_FORMS[::2]]
SOME_KINDS = [("bfloat16", "causal"), ("bfloat16", "alibi_sqrt-template")]
SOME_KINDS += [("float32", form) for form in ("none", "causal", "alibi-heads")]
SIZES = [
    ("float16", 1),
    ("float16", 41),
    ("float16", 64),
    ("bfloat16", 80),
    ("float16", 128),
    ("bfloat16", 192),
    ("float16", 256),
]
FMA_SIZES = [("float32", 80), ("bfloat16", 128), ("float32", 256)]
HEAD_SIZES = [((8, 0), *size) for size in SIZES] + [((9, 0), *size) for size in SIZES[1::2]]
HEAD_SIZES += [((12, 0), *size) for size in SIZES[::2]] + [((7, 5), *size) for size in FMA_SIZES]
MANY = 5


# The kernel of a test, by its name and its parameters: (dtype, head size, form, compute capability,
# mask's dtype).
KERNEL_OF: dict[str, Any] = {
    "test_mask_kinds": lambda cc, form: ("float16", 32, form, cc, "float32"),
    "test_dtypes": lambda dtype, form: (dtype, 32, form, (8, 0), dtype),
    "test_head_sizes": lambda cc, dtype, head_size: (dtype, head_size, "causal", cc, ""),
    "test_masks_of_large_heads": lambda form: ("float16", 128, form, (9, 0), "float32"),
    "test_split_keys": lambda cc, form: ("float16", 32, form, cc, "float32"),
    "test_scales": lambda cc, qk_scale: ("float16", 32, "causal", cc, ""),
    "test_no_bank_conflicts": lambda family, dtype, head_size: (
        *(dtype, head_size, "causal"),
        *((8, 0) if family == "mma" else (7, 5), ""),
    ),
}


def build_ahead(items: list[Any]) -> None:
    """The kernels of these tests, from the beginning of a session (conftest.py), if there are
    many."""
    cases = [KERNEL_OF[item.originalname](**item.callspec.params) for item in items if item.originalname in KERNEL_OF]
    if len(cases) >= MANY:
        cuda_target.build_ahead((cuda_target.spec_of(*case), case[3]) for case in cases)


def ragged(dtype: str, **sizes: Any) -> Case:
    return make_case(*RAGGED, dtype=dtype, **({"head_num": 4, "kv_head_num": 2, "head_size": 32} | sizes))


def check(case: Case, cc: tuple[int, int], **options: Any) -> None:
    out, lse = run(case, "cuda", cc=cc, return_lse=True, **options)
    assert_close(out, case, lse)


@pytest.mark.parametrize(
    "cc, form", KINDS, ids=lambda value: value if isinstance(value, str) else f"{value[0]}.{value[1]}"
)
def test_mask_kinds(cc: tuple[int, int], form: str) -> None:
    check(with_mask(ragged("float16"), form), cc)


@pytest.mark.parametrize("dtype, form", SOME_KINDS)
def test_dtypes(dtype: str, form: str) -> None:
    check(with_mask(ragged(dtype), form, mask_dtype=dtype), (8, 0))


@pytest.mark.parametrize("cc, dtype, head_size", HEAD_SIZES)
def test_head_sizes(cc: tuple[int, int], dtype: str, head_size: int) -> None:
    check(make_case([35, 1], [70, 3], head_num=2, kv_head_num=1, head_size=head_size, dtype=dtype), cc)


@pytest.mark.parametrize("form", ["alibi-template", "alibi-heads"])
def test_masks_of_large_heads(form: str) -> None:
    """Their key tiles are smaller."""
    check(with_mask(make_case([35, 1], [170, 3], head_num=2, head_size=128, dtype="float16"), form), (9, 0))


@pytest.mark.parametrize("cc", CCS, ids=NAMES)
@pytest.mark.parametrize("form", ["causal", "alibi_left_align-template"])
def test_split_keys(cc: tuple[int, int], form: str) -> None:
    """Few rows over many keys: several blocks share them, and a second kernel merges."""
    case = make_case([1, 2], [2060, 30], head_num=2, kv_head_num=1, head_size=32, dtype="float16", block_size=48)
    check(with_mask(case, form), cc)


@pytest.mark.parametrize("cc", [(7, 5), (9, 0)], ids=str)
@pytest.mark.parametrize("left, right", [(30, 0), (90, 20), (tiling.NO_LIMIT, 3), (5, tiling.NO_LIMIT), (0, 0)])
def test_ranges(cc: tuple[int, int], left: int, right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys on either side of what a row sees take no part, be they infinite; nor do whole tiles of
    them."""
    monkeypatch.setattr(work, "visible_beside", lambda problem: (left, right))
    case = make_case([70, 3], [200, 90], head_num=4, kv_head_num=2, head_size=32, dtype="float16")
    case.value[case.block_tables[0, 10], 3, 0, 5] = np.inf  # key 163 of sequence 0
    case.values[0][163, 0, 5] = 0
    out = run(case, "cuda", cc=cc).astype(np.float64)
    for b, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        rows = np.arange(case.starts[b], case.starts[b + 1])
        kv_pos, q_pos = np.arange(len(keys)), case.q_pos[rows][:, None]
        is_seen = (kv_pos >= q_pos - left) & (kv_pos <= q_pos + right)
        for h in range(4):
            score = case.query[rows, h].astype(np.float64) @ keys[:, h // 2].astype(np.float64).T * case.qk_scale
            p = np.where(is_seen, np.exp(score - score.max(axis=1, keepdims=True)), 0)
            want = p @ values[:, h // 2].astype(np.float64) / p.sum(axis=1, keepdims=True)
            is_infinite = np.zeros(want.shape, bool)
            is_infinite[:, 5] = is_seen[:, 163] if (b, h // 2) == (0, 0) else False
            np.testing.assert_array_equal(np.isfinite(out[rows, h]), ~is_infinite)
            np.testing.assert_allclose(out[rows, h][~is_infinite], want[~is_infinite], atol=4e-3)


@pytest.mark.parametrize("cc", [(7, 5), (9, 0)], ids=str)
@pytest.mark.parametrize("infinite, leading", [(100, 2000), (2058, 5)])
def test_outweighed_infinity(cc: tuple[int, int], infinite: int, leading: int) -> None:
    """In the split whose factor is 0: on both targets it reaches the same rows, those that see
    it."""
    case, launches = outweighed_infinity(infinite, leading), []

    def execute(launched: Launched, memory: Memory) -> None:
        launches.append(launched.kernel)
        interpreted(launched, memory)

    out, on_cpu = run(case, "cuda", cc=cc, execute=execute), run(case, "cpu")
    assert [name.split("_")[0] for name in launches] == ["fma" if cc == (7, 5) else "mma", "merge"]
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(on_cpu))
    np.testing.assert_array_equal(np.isfinite(out[:, 0, 3]), case.q_pos < infinite)
    assert (np.delete(out[:, 0], 3, axis=1) == 1).all()


@pytest.mark.parametrize("cc", [(7, 5), (9, 0)], ids=str)
@pytest.mark.parametrize("qk_scale", [-0.3, 0.0, 40.0])
def test_scales(cc: tuple[int, int], qk_scale: float) -> None:
    check(ragged("float16", qk_scale=qk_scale), cc)


@pytest.mark.parametrize("cc", [(7, 5), (9, 0)], ids=str)
def test_future_keys_stay_hidden(cc: tuple[int, int]) -> None:
    """Infinities and NaN of keys and values reach the rows that see them and no other, within a
    tile and across tiles."""
    case = make_case([70], [90], head_size=32, dtype="float16")
    case.values[0][40, 0, :3] = np.nan, np.inf, -np.inf
    case.values[0][60, 0, 1:4] = -np.inf, np.inf, np.nan
    case.keys[0][85, 0, 5] = np.nan
    for b, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        for j in range(len(keys)):
            page, slot = case.block_tables[b, j // 16], j % 16
            case.key[page, slot], case.value[page, slot] = keys[j], values[j]
    out = run(case, "cuda", cc=cc).astype(np.float64)[:, 0]
    q_pos = case.q_pos
    assert (np.isnan(out[:, 0]) == (q_pos >= 40)).all()
    assert (np.isnan(out[:, 1]) == (q_pos >= 60)).all()
    assert (np.isposinf(out[:, 1]) == ((q_pos >= 40) & (q_pos < 60))).all()
    assert (np.isneginf(out[:, 2]) == ((q_pos >= 40) & (q_pos < 60))).all()
    assert (np.isnan(out[:, 3]) == (q_pos >= 60)).all()
    assert (np.isnan(out[:, 4:]).all(axis=1) == (q_pos >= 85)).all()


# --- what machine code must not have


@pytest.mark.parametrize(
    "family, dtype, head_size", [("mma", dtype, size) for dtype, size in SIZES if size >= 64]
    + [("mma", "float16", 32), ("fma", "float32", 32), ("fma", "float32", 80), ("fma", "float32", 256)],
)  # fmt: skip
def test_no_bank_conflicts(family: str, dtype: str, head_size: int) -> None:
    """Shared memory is read without conflicts, and written without on tensor cores; plain
    arithmetic may have a few where it stores weights."""
    found: list[Any] = []

    def execute(launched: Launched, memory: Memory) -> None:
        ptx = launched.cubin.decode()
        stats = cuda_target.parsed(ptx).run(
            launched.kernel, grid=launched.grid, block=launched.block, shared_bytes=launched.shared_bytes,
            arguments=list(launched.params), memory=memory,
        )  # fmt: skip
        found.append((stats, ptx.splitlines()))

    run(
        make_case([64], [64], head_size=head_size, dtype=dtype),
        "cuda",
        cc=(8, 0) if family == "mma" else (7, 5),
        execute=execute,
    )
    ((stats, lines),) = found
    for line, conflicts in stats.bank_conflicts.items():
        text = lines[line - 1].strip()
        assert not conflicts or (family == "fma" and text.startswith("st.shared.f32")), f"{conflicts} at {text}"


# --- faults that the interpreter would see


def mutated(pattern: str, replacement: str, which: int) -> Any:
    """An execute that changes one place of the attention kernel's PTX."""

    def execute(launched: Launched, memory: Memory) -> None:
        ptx = launched.cubin.decode()
        places = list(re.finditer(pattern, ptx))
        assert len(places) > which, pattern
        at = places[which]
        changed = ptx[: at.start()] + at.expand(replacement) + ptx[at.end() :]
        cuda_target.parsed(changed).run(
            launched.kernel, grid=launched.grid, block=launched.block, shared_bytes=launched.shared_bytes,
            arguments=list(launched.params), memory=memory,
        )  # fmt: skip

    return execute


def count(pattern: str, spec: KernelSpec, cc: tuple[int, int] = (8, 0)) -> int:
    return len(re.findall(pattern, cuda_target.compiled(spec, cc).ptx))


MMA = KernelSpec("mma", "float16", "float16", 32)
FMA = KernelSpec("fma", "float32", "float32", 32)
BARRIER = r"\bbar(?:rier)?\.sync\s[^;]*;"


def tiles(dtype: str) -> Case:
    """Several key tiles, none of them whole, and infinities."""
    case = make_case([130], [200], head_size=32, dtype=dtype)
    case.value[case.block_tables[0, 10], 3, 0, 3] = np.inf
    return case


@pytest.mark.parametrize("dtype, spec", [("float16", MMA), ("float32", FMA)])
def test_a_dropped_barrier_shows(dtype: str, spec: KernelSpec) -> None:
    case, barriers = tiles(dtype), count(BARRIER, spec)
    assert barriers >= 4
    for which in range(barriers):
        with pytest.raises((SharedRace, InFlight)):
            run(case, "cuda", execute=mutated(BARRIER, "", which))


def test_a_dropped_wait_shows() -> None:
    pattern = r"cp\.async\.wait_group 0;"
    for which in range(2):
        with pytest.raises(InFlight):
            run(tiles("float16"), "cuda", execute=mutated(pattern, "", which))


@pytest.mark.parametrize(
    "pattern, replacement",
    [
        (r"(shfl\.sync\.)bfly(\.b32[^;]*;)", r"\1up\2"),
        (r"(ldmatrix[^;]*x4)\.trans", r"\1"),
        (r"ex2\.approx\.ftz\.f32 (%f\d+), (%f\d+)", r"lg2.approx.ftz.f32 \1, \2"),
    ],
    ids=["shuffle", "transposition", "function"],
)
def test_a_wrong_instruction_shows(pattern: str, replacement: str) -> None:
    case = ragged("float16")
    try:
        out = run(case, "cuda", execute=mutated(pattern, replacement, 0))
    except Fault:
        return
    with pytest.raises(AssertionError):
        assert_close(out, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_block_is_not_read(dtype: str) -> None:
    """The interpreter knows every byte that a kernel may touch: a table entry out of range must not
    lead anywhere."""
    case = ragged(dtype)
    for bad in (-1, len(case.key), 1 << 30, -(2**31)):
        case.block_tables[2, 3] = bad
        with pytest.raises(ValueError, match=f"block_tables: got block {bad} for sequence 2, column 3"):
            run(case, "cuda", validate="wait")


def test_registers_hold_everything() -> None:
    """No spills and no local memory, in whatever this session has compiled of the common head
    sizes."""
    for cc, head_size in itertools.product([(7, 5), (8, 0)], [32, 64]):
        spec = cuda_target.spec_of("float16", head_size, "causal", cc)
        assert cuda_target.is_measured(spec)
        cuda_target.compiled(spec, cc)
    measured = [made for (spec, _), made in cuda_target.kernels.items() if cuda_target.is_measured(spec)]
    assert all(32 <= made.registers <= 255 for made in measured)
    for made in measured:
        assert (made.spill_bytes, made.local_bytes) == (0, 0), (made.name, made.cc)


def test_no_double_precision() -> None:
    """Nothing in any kernel that this session has compiled computes in float64."""
    for dtype, cc in itertools.product(DTYPES, [(7, 5), (8, 0)]):
        if dtype != "bfloat16" or cc == (8, 0):
            cuda_target.compiled(cuda_target.spec_of(dtype, 32, "causal", cc), cc)
    assert len(cuda_target.kernels) >= 5
    for compiled in cuda_target.kernels.values():
        assert ".f64" not in compiled.ptx, compiled.name
