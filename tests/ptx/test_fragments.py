"""Tensor-core fragments and asynchronous copies, against the layouts of the PTX ISA manual
(9.7.14.5, mma.m16n8k8 and m16n8k16)."""

from __future__ import annotations

import numpy as np
import pytest

from ptx.text import entry, run

RNG = np.random.default_rng(6)
LANES = np.arange(32)
GROUP, PLACE = LANES >> 2, LANES % 4
SHARED = ".extern .shared .align 16 .b8 s[];"


def bits(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 as 16-bit patterns."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def numbers(patterns: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return patterns.view(np.float16).astype(np.float64)
    return (patterns.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def pack(elements: list[np.ndarray]) -> np.ndarray:
    """Elements a0, a1, ... of every lane -> registers [lane, register], low halves first."""
    halves = np.stack(elements, axis=1).astype(np.uint16)
    return np.ascontiguousarray(halves).view(np.uint32)


def a_fragment(a: np.ndarray) -> np.ndarray:
    elements = []
    for i in range(a.shape[1] // 2):
        row = GROUP if i % 4 < 2 else GROUP + 8
        column = PLACE * 2 + (i & 1) + (8 if i >= 4 else 0)
        elements.append(a[row, column])
    return pack(elements)


def b_fragment(b: np.ndarray) -> np.ndarray:
    return pack([b[PLACE * 2 + (i & 1) + (8 if i >= 2 else 0), GROUP] for i in range(b.shape[0] // 4)])


def c_fragment(c: np.ndarray) -> np.ndarray:
    return np.stack([c[GROUP + (8 if i >= 2 else 0), PLACE * 2 + (i & 1)] for i in range(4)], axis=1)


def row_address(base: str, register: str, size: int) -> str:
    return f"mul.wide.u32 {register}, %r0, {size}; add.s64 {register}, {register}, {base};\n"


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str, warps: int = 1) -> np.ndarray:
    k = a.shape[1]
    num_a, num_b = k // 4, k // 8
    names_a, names_b = ([f"%r{10 + i}" for i in range(num_a)], [f"%r{20 + i}" for i in range(num_b)])
    body = (
        row_address("%rd0", "%rd5", 4 * num_a)
        + row_address("%rd1", "%rd6", 4 * num_b)
        + row_address("%rd2", "%rd7", 16)
    )
    body += row_address("%rd3", "%rd8", 16) + f"ld.global.v{num_a}.b32 {{{', '.join(names_a)}}}, [%rd5];"
    body += f"ld.global.{f'v{num_b}.' if num_b > 1 else ''}b32 {{{', '.join(names_b)}}}, [%rd6];"
    body += "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd7];"
    body += f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{%f1,%f2,%f3,%f4}}, {{{','.join(names_a)}}}, "
    body += f"{{{','.join(names_b)}}}, {{%f1,%f2,%f3,%f4}}; st.global.v4.f32 [%rd8], {{%f1, %f2, %f3, %f4}};"
    arrays = [np.concatenate([part] * warps) for part in (a_fragment(a), b_fragment(b), c_fragment(c))]
    out = np.zeros((32 * warps, 4), np.float32)
    run(entry(body, "a b c d"), [*arrays, out], block=32 * warps)
    assert all((out[:32] == out[32 * warp : 32 * warp + 32]).all() or np.isnan(out).any() for warp in range(warps))
    return out[:32]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("k", [8, 16])
def test_mma_of_whole_numbers_is_exact(k: int, kind: str) -> None:
    """Small whole numbers leave no rounding: every element must be in its place."""
    a, b = bits(RNG.integers(-8, 9, (16, k)), kind), bits(RNG.integers(-8, 9, (k, 8)), kind)
    c = RNG.integers(-100, 100, (16, 8)).astype(np.float32)
    expected = numbers(a, kind) @ numbers(b, kind) + c
    np.testing.assert_array_equal(mma(a, b, c, kind, warps=3), c_fragment(expected))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mma_accumulates_in_float32_and_truncates(kind: str) -> None:
    a, b = bits(RNG.normal(size=(16, 16)), kind), bits(RNG.normal(size=(16, 8)), kind)
    c = RNG.normal(size=(16, 8)).astype(np.float32)
    exact = numbers(a, kind) @ numbers(b, kind) + c
    found = mma(a, b, c, kind).astype(np.float64)
    error = np.abs(found - c_fragment(exact))
    size = np.abs(numbers(a, kind)) @ np.abs(numbers(b, kind)) + np.abs(c)
    assert (error <= 2 * 2.0**-23 * c_fragment(size)).all()
    # 1 + 2**-24 is closest to 1, and is cut to it; 1 - 2**-25 is cut to the number below 1.
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    a[:, 0], b[0] = 2.0**-12, [2.0**-12, -(2.0**-13)] * 4
    found = mma(bits(a, kind), bits(b, kind), np.ones((16, 8), np.float32), kind)
    np.testing.assert_array_equal(np.unique(found), np.float32([1 - 2.0**-24, 1]))


def test_mma_and_infinities() -> None:
    a, b, c = np.zeros((16, 16)), np.ones((16, 8)), np.zeros((16, 8), np.float32)
    a[3, 2], a[5, 1] = np.inf, np.nan
    b[2, 4] = 0
    found = mma(bits(a, "f16"), bits(b, "f16"), c, "f16")
    expected = np.zeros((16, 8))
    expected[3], expected[5], expected[3, 4] = np.inf, np.nan, np.nan
    np.testing.assert_array_equal(found, c_fragment(expected))
    assert set(found[np.isnan(found)].view(np.uint32).tolist()) == {0x7FFFFFFF}


def through_shared(rows: np.ndarray, code: str, num_out: int, num_in: int = 0) -> np.ndarray:
    """Copies rows of 16 bytes to shared memory, runs code (%r1: this lane's row; %r2: the first),
    stores %r10, %r11, ..."""
    out = np.zeros((32, num_out), np.uint32)
    body = row_address("%rd0", "%rd5", 16) + row_address("%rd1", "%rd6", 4 * num_out)
    body += "mov.u32 %r2, s; mad.lo.u32 %r1, %r0, 16, %r2; ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd5];"
    body += "st.shared.v4.u32 [%r1], {%r3, %r4, %r5, %r6}; bar.sync 0;" + code
    registers = ", ".join(f"%r{10 + i}" for i in range(num_out))
    body += f"st.global.{f'v{num_out}.' if num_out > 1 else ''}u32 [%rd6], {{{registers}}};"
    run(entry(body, "rows out", SHARED), [rows, out], shared_bytes=512)
    return out


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, is_transposed: bool) -> None:
    """Lanes 8 i ... 8 i + 7 give the rows of matrix i, here in a shuffled order."""
    matrices = RNG.integers(0, 65536, (4, 8, 8)).astype(np.uint16)
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    trans = ".trans" if is_transposed else ""
    # Row j lies at row 5 j + 3 (of 32): addresses need not be in order.
    order = (5 * LANES + 3) % 32
    rows = np.zeros((32, 8), np.uint16)
    rows[order] = matrices.reshape(32, 8)
    code = "mad.lo.u32 %r7, %r0, 5, 3; and.b32 %r7, %r7, 31; mad.lo.u32 %r8, %r7, 16, %r2;"
    code += f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r8];"
    found = through_shared(rows, code, count)
    for i in range(count):
        m = matrices[i].T if is_transposed else matrices[i]
        np.testing.assert_array_equal(
            found[:, i], m[GROUP, PLACE * 2].astype(np.uint32) | m[GROUP, PLACE * 2 + 1].astype(np.uint32) << 16
        )


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stmatrix_and_movmatrix(is_transposed: bool) -> None:
    rows = RNG.integers(0, 65536, (32, 8)).astype(np.uint16)
    trans = ".trans" if is_transposed else ""
    code = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r1]; bar.warp.sync -1;"
    code += f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1], {{%r20, %r21, %r22, %r23}}; bar.warp.sync -1;"
    code += "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r1];"
    found = through_shared(rows, code, 4).view(np.uint16).reshape(4, 8, 8)
    matrices = rows.reshape(4, 8, 8)
    np.testing.assert_array_equal(found, matrices.transpose(0, 2, 1) if is_transposed else matrices)
    code = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r1]; movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r20;"
    same = "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r10}, [%r1];"
    np.testing.assert_array_equal(through_shared(rows, code, 1), through_shared(rows, same, 1))


@pytest.mark.parametrize("size", [4, 8, 16])
def test_copies_and_zeros_past_what_is_read(size: int) -> None:
    source = RNG.integers(1, 255, (32, size)).astype(np.uint8)
    read = RNG.integers(0, size + 1, 32).astype(np.uint32)
    read[:3] = 0, size, 1
    out = np.zeros_like(source)
    how = "cg" if size == 16 else "ca"
    body = row_address("%rd0", "%rd5", size) + row_address("%rd1", "%rd6", 4) + row_address("%rd2", "%rd7", size)
    body += f"ld.global.u32 %r1, [%rd6]; mov.u32 %r2, s; mad.lo.u32 %r2, %r0, {size}, %r2;"
    # Nothing is read if nothing is asked for: the address may be anywhere.
    body += "setp.eq.u32 %p1, %r1, 0; selp.b64 %rd5, 4096, %rd5, %p1;"
    body += f"cp.async.{how}.shared.global.L2::128B [%r2], [%rd5], {size}, %r1; cp.async.wait_all;"
    registers = {4: "%r10", 8: "{%r10, %r11}", 16: "{%r10, %r11, %r12, %r13}"}[size]
    vector = {4: "", 8: "v2.", 16: "v4."}[size]
    body += f"ld.shared.{vector}u32 {registers}, [%r2]; st.global.{vector}u32 [%rd7], {registers};"
    statistics = run(entry(body, "source read out", SHARED), [source, read, out], shared_bytes=512)
    np.testing.assert_array_equal(out, np.where(np.arange(size) < read[:, None], source, 0))
    assert statistics.num_bytes["shared written"] == 32 * size


def test_a_group_lands_when_it_is_waited_for_and_not_before() -> None:
    """Two groups into two buffers: wait_group 1 lands the first alone."""
    source = RNG.integers(0, 2**31, (2, 32, 4)).astype(np.uint32)
    out = np.zeros((2, 32, 4), np.uint32)
    body = (
        row_address("%rd0", "%rd5", 16)
        + row_address("%rd1", "%rd6", 16)
        + "mov.u32 %r2, s; mad.lo.u32 %r2, %r0, 16, %r2;"
    )
    body += "cp.async.cg.shared.global [%r2], [%rd5], 16; cp.async.commit_group;"
    body += "cp.async.cg.shared.global [%r2+512], [%rd5+512], 16; cp.async.commit_group; cp.async.wait_group 1;"
    body += "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2]; st.global.v4.u32 [%rd6], {%r10, %r11, %r12, %r13};"
    body += "cp.async.wait_group 0;"
    body += (
        "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2+512]; st.global.v4.u32 [%rd6+512], {%r10, %r11, %r12, %r13};"
    )
    run(entry(body, "source out", SHARED), [source, out], shared_bytes=1024)
    np.testing.assert_array_equal(out, source)


def test_an_ignored_source_is_zeros() -> None:
    source, out = np.full((32, 4), 7, np.uint32), np.ones((32, 4), np.uint32)
    body = (
        row_address("%rd0", "%rd5", 16)
        + row_address("%rd1", "%rd6", 16)
        + "mov.u32 %r2, s; mad.lo.u32 %r2, %r0, 16, %r2;"
    )
    body += "setp.lt.u32 %p1, %r0, 5; cp.async.cg.shared.global [%r2], [%rd5], 16, %p1; cp.async.wait_all;"
    body += "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2]; st.global.v4.u32 [%rd6], {%r10, %r11, %r12, %r13};"
    run(entry(body, "source out", SHARED), [source, out], shared_bytes=512)
    np.testing.assert_array_equal(out[:, 0], [0] * 5 + [7] * 27)
