"""Branches, warps, barriers and atomics."""

from __future__ import annotations

import numpy as np
import pytest

from ptx import Module
from ptx.text import entry, run

RNG = np.random.default_rng(5)


def address(register: str, base: str, index: str, size: int = 4) -> str:
    return f"mul.wide.u32 {register}, {index}, {size}; add.s64 {register}, {register}, {base};\n"


STORE = address("%rd9", "%rd1", "%r0") + "st.global.u32 [%rd9], %r5;"
LOAD = address("%rd8", "%rd0", "%r0") + "ld.global.u32 %r1, [%rd8];"


def on_lanes(code: str, values: np.ndarray, block: int = 32) -> np.ndarray:
    """%r1 holds the thread's value, %r5 its result."""
    values = np.ascontiguousarray(values.astype(np.uint32))
    out = np.zeros(block, np.uint32)
    run(entry(LOAD + code + STORE, "values out"), [values, out], block=block)
    return out


def test_threads_part_and_meet_again() -> None:
    """Collatz steps: every thread loops as often as its number needs, and all leave together."""
    code = """
        mov.u32 %r5, 0;
        $LOOP: setp.eq.u32 %p1, %r1, 1; @%p1 bra $DONE;
        add.u32 %r5, %r5, 1; and.b32 %r2, %r1, 1; setp.eq.u32 %p2, %r2, 0;
        @%p2 bra $EVEN;
        mad.lo.u32 %r1, %r1, 3, 1; bra.uni $LOOP;
        $EVEN: shr.u32 %r1, %r1, 1; bra.uni $LOOP;
        $DONE: bar.sync 0; activemask.b32 %r3; mov.u32 %r4, -1; setp.ne.u32 %p3, %r3, %r4;
        @%p3 mov.u32 %r5, 12345;
    """

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    values = RNG.integers(1, 50, 64)
    assert on_lanes(code, values, 64).tolist() == [steps(int(n)) for n in values]


def test_they_meet_again_though_the_loop_stands_behind_its_end() -> None:
    code = """
        mov.u32 %r5, 0; bra.uni $TEST;
        $DONE: bar.sync 0; bra.uni $END;
        $BODY: add.u32 %r5, %r5, 2; sub.u32 %r1, %r1, 1;
        $TEST: setp.eq.u32 %p1, %r1, 0; @%p1 bra $DONE; bra.uni $BODY;
        $END:
    """
    values = RNG.integers(0, 20, 64)
    assert on_lanes(code, values, 64).tolist() == (2 * values).tolist()


def test_guards() -> None:
    code = "setp.gt.u32 %p1, %r1, 5; mov.u32 %r5, 1; @%p1 mov.u32 %r5, 2; @!%p1 add.u32 %r5, %r5, 10;"
    assert on_lanes(code, np.arange(32)).tolist() == [11] * 6 + [2] * 26


def test_early_exits_leave_the_others_running() -> None:
    code = "setp.gt.u32 %p1, %r1, 20; @%p1 ret; bar.sync 0; mov.u32 %r5, %r1;"
    assert on_lanes(code, np.arange(32)).tolist() == [*range(21), *[0] * 11]


def test_inline_blocks_have_their_own_registers_and_labels_stay() -> None:
    code = """
        mov.u32 %r5, 0;
        // begin inline asm
        { .reg .u32 t; .reg .pred p; add.u32 t, %r1, 1; setp.gt.u32 p, t, 10; @p bra IN1; add.u32 %r5, t, 100; IN1: }
        // end inline asm
        { .reg .u64 t; cvt.u64.u32 t, %r1; { .reg .u32 t; mov.u32 t, 1; add.u32 %r5, %r5, t; } cvt.u32.u64 %r6, t; }
        add.u32 %r5, %r5, %r6;
    """
    assert on_lanes(code, np.arange(32)).tolist() == [n + 2 + n + 100 if n < 10 else n + 1 for n in range(32)]


SHUFFLES = {
    "up": lambda lane, by, width: lane - by if lane % width >= by else lane,
    "down": lambda lane, by, width: lane + by if lane % width + by < width else lane,
    "bfly": lambda lane, by, width: lane ^ by if (lane ^ by) // width <= lane // width else lane,
    "idx": lambda lane, by, width: lane // width * width + by % width,
}


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("mode", SHUFFLES)
def test_shuffles(mode: str, width: int) -> None:
    values = RNG.integers(0, 1000, 64)
    segments = (32 - width) << 8 | (0 if mode == "up" else 31)
    for by in (0, 1, 3, 7, width // 2):
        out = on_lanes(f"shfl.sync.{mode}.b32 %r5|%p1, %r1, {by}, {segments}, -1;", values, 64)
        expected = [values[i // 32 * 32 + SHUFFLES[mode](i % 32, by, width)] for i in range(64)]
        assert out.tolist() == expected, by


def test_shuffle_predicates() -> None:
    out = on_lanes("shfl.sync.down.b32 %r6|%p1, %r1, 4, 31, -1; selp.u32 %r5, 1, 0, %p1;", np.arange(32))
    assert out.tolist() == [1] * 28 + [0] * 4


def test_votes_and_masks() -> None:
    values = RNG.integers(0, 5, 64)
    pred = values > 2
    bits = [int(sum(1 << i for i in range(32) if pred[w * 32 + i])) for w in range(2)]
    test = "setp.gt.u32 %p1, %r1, 2; "
    assert on_lanes(test + "vote.sync.ballot.b32 %r5, %p1, -1;", values, 64).tolist() == [
        bits[i // 32] for i in range(64)
    ]
    negated = on_lanes(test + "vote.sync.ballot.b32 %r5, !%p1, -1;", values, 64).tolist()
    assert negated == [bits[i // 32] ^ 0xFFFFFFFF for i in range(64)]
    for mode, limit in (("any", 3), ("all", 0)):
        code = f"setp.ge.u32 %p1, %r1, {limit}; vote.sync.{mode}.pred %p2, %p1, -1; selp.u32 %r5, 1, 0, %p2;"
        assert on_lanes(code, values, 64).all()
    assert not on_lanes(
        "setp.gt.u32 %p1, %r1, 9; vote.sync.any.pred %p2, %p1, -1; selp.u32 %r5, 1, 0, %p2;", values, 64
    ).any()
    same = [sum(1 << j for j in range(32) if values[i // 32 * 32 + j] == values[i]) for i in range(64)]
    assert on_lanes("match.any.sync.b32 %r5, %r1, -1;", values, 64).tolist() == same
    assert on_lanes("redux.sync.add.u32 %r5, %r1, -1;", values, 64).tolist() == [
        values[i // 32 * 32 :][:32].sum() for i in range(64)
    ]
    # Members that are only a part of the warp, all of them there.
    part = "setp.lt.u32 %p1, %r0, 8; mov.u32 %r5, 0; @%p1 bra $A; bra $B; $A: redux.sync.max.u32 %r5, %r1, 255; $B:"
    assert on_lanes(part, values).tolist() == [values[:8].max()] * 8 + [0] * 24


def test_barrier_reductions() -> None:
    values = RNG.integers(0, 4, 96)
    test = "setp.gt.u32 %p1, %r1, 2; "
    assert on_lanes(test + "bar.red.popc.u32 %r5, 0, %p1;", values, 96).tolist() == [(values > 2).sum()] * 96
    assert on_lanes(test + "bar.red.or.pred %p2, 0, %p1; selp.u32 %r5, 1, 0, %p2;", values, 96).tolist() == [1] * 96
    assert on_lanes(test + "bar.red.and.pred %p2, 0, !%p1; selp.u32 %r5, 1, 0, %p2;", values, 96).tolist() == [0] * 96


def test_blocks_of_no_whole_warps() -> None:
    code = "setp.gt.u32 %p1, %r1, 2; bar.red.popc.u32 %r2, 0, %p1; vote.sync.ballot.b32 %r3, %p1, -1; mad.lo.u32 %r5, %r2, 1000, %r3;"
    values = RNG.integers(0, 5, 40)
    bits = [sum(1 << i for i in range(32) if w * 32 + i < 40 and values[w * 32 + i] > 2) for w in range(2)]
    expected = [((values > 2).sum() * 1000 + bits[i // 32]) % 2**32 for i in range(40)]
    assert on_lanes(code, values, 40).tolist() == expected


def test_special_registers() -> None:
    body = """
        mov.u32 %r1, %tid.y; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %nctaid.x; mov.u32 %r5, %ntid.x;
        mov.u32 %r6, %ntid.y; mad.lo.u32 %r7, %r1, %r5, %r0; mad.lo.u32 %r8, %r3, %r4, %r2; mul.lo.u32 %r9, %r5, %r6;
        mad.lo.u32 %r10, %r8, %r9, %r7; mul.wide.u32 %rd2, %r10, 16; add.s64 %rd3, %rd0, %rd2;
        mov.u32 %r11, %laneid; mov.u32 %r12, %warpid; mov.u32 %r13, %lanemask_le; mov.u32 %r14, %dynamic_smem_size;
        st.global.v4.u32 [%rd3], {%r11, %r12, %r13, %r14};
    """
    out = np.zeros((6, 64, 4), np.uint32)
    run(entry(body, "out", ".extern .shared .align 4 .b8 s[];"), [out], grid=(2, 3), block=(16, 4), shared_bytes=48)
    thread = np.arange(64)
    expected = np.stack([thread % 32, thread // 32, (2 << thread % 32) - 1, np.full(64, 48)], axis=1)
    np.testing.assert_array_equal(out, np.broadcast_to(expected, out.shape))


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(space: str) -> None:
    values = RNG.integers(0, 1000, 64).astype(np.uint32)
    body = LOAD
    if space == "shared":
        body += (
            "mov.u64 %rd5, s; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.v4.u32 [%rd5], {0, 0, 1000000, 7}; bar.sync 0;"
        )
    else:
        body += "mov.u64 %rd5, %rd1;"
    body += f"""
        atom.{space}.add.u32 %r2, [%rd5], %r1; red.{space}.max.u32 [%rd5+4], %r1; atom.{space}.min.u32 %r3, [%rd5+8], %r1;
        mov.u32 %r4, 7; atom.{space}.cas.b32 %r6, [%rd5+12], %r4, %r0;
    """
    if space == "shared":
        body += "bar.sync 0; ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%rd5]; @%p1 st.global.v4.u32 [%rd1], {%r10, %r11, %r12, %r13};"
    body += address("%rd9", "%rd2", "%r0") + "st.global.u32 [%rd9], %r2;"
    cells, old = np.array([0, 0, 1000000, 7], np.uint32), np.zeros(64, np.uint32)
    run(entry(body, "values cells old", ".shared .align 16 .b8 s[16];"), [values, cells, old], block=64)
    assert cells[:3].tolist() == [values.sum(), values.max(), values.min()] and 0 <= cells[3] < 64
    before = np.sort(old)
    assert before[0] == 0 and (np.diff(np.append(before, values.sum())) > 0).sum() == np.count_nonzero(values)


def test_generic_addresses() -> None:
    body = (
        LOAD
        + """
        mul.wide.u32 %rd2, %r0, 4; mov.u64 %rd3, s; cvta.shared.u64 %rd4, %rd3; add.s64 %rd4, %rd4, %rd2;
        st.u32 [%rd4], %r1; bar.sync 0; xor.b32 %r2, %r0, 1; mul.wide.u32 %rd2, %r2, 4; add.s64 %rd5, %rd3, %rd2;
        ld.shared.u32 %r3, [%rd5]; mov.u64 %rd6, depot; st.local.u32 [%rd6+4], %r3; cvta.local.u64 %rd7, %rd6;
        ld.u32 %r5, [%rd7+4]; cvta.to.global.u64 %rd1, %rd1; isspacep.shared %p1, %rd4; @!%p1 trap;
    """
    )
    values = np.arange(32, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    run(
        entry(".local .align 8 .b8 depot[8];" + body + STORE, "values out", ".shared .align 4 .b8 s[128];"),
        [values, out],
    )
    assert out.tolist() == [n ^ 1 for n in range(32)]


def test_constants_of_the_module() -> None:
    table = ".const .align 4 .u32 table[4] = {5, 0x10, 7, 9};\n.global .align 8 .u64 spare;"
    body = "and.b32 %r2, %r0, 3; mul.wide.u32 %rd2, %r2, 4; mov.u64 %rd3, table; add.s64 %rd4, %rd3, %rd2; ld.const.u32 %r5, [%rd4];"
    out = np.zeros(32, np.uint32)
    run(entry("mov.u64 %rd1, %rd0;" + body + STORE, "out", table), [out])
    assert out.tolist() == [5, 16, 7, 9] * 8


@pytest.mark.parametrize("lanes", [32, 64, 1024])
def test_results_do_not_depend_on_how_many_blocks_run_together(lanes: int) -> None:
    body = """
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, 0; mov.u32 %r3, s; shl.b32 %r4, %r0, 2; add.u32 %r3, %r3, %r4;
        $L: add.u32 %r2, %r2, 1; st.shared.u32 [%r3], %r2; bar.sync 0; setp.lt.u32 %p1, %r2, %r1; @%p1 bra $L;
        mov.u32 %r6, s; xor.b32 %r7, %r4, 64; add.u32 %r6, %r6, %r7; ld.shared.u32 %r5, [%r6];
        shl.b32 %r8, %r1, 6; add.u32 %r0, %r0, %r8;
    """
    out = np.zeros((7, 64), np.uint32)
    text = entry("mov.u64 %rd1, %rd0;" + body + STORE, "out", ".shared .align 128 .b8 s[256];")
    statistics = run(text, [out], grid=7, block=64, lanes=lanes)
    np.testing.assert_array_equal(out, np.repeat([1, 1, 2, 3, 4, 5, 6], 64).reshape(7, 64))
    assert statistics.instructions["st.shared.u32"] == 2 * (1 + 1 + 2 + 3 + 4 + 5 + 6)


def test_parameters_of_all_kinds() -> None:
    text = """.version 9.0
.target sm_100
.address_size 64
.visible .entry f(.param .u64 .ptr .global .align 4 out, .param .f32 x, .param .b32 y, .param .align 8 .b8 z[8])
.maxntid 64, 1, 1
{
    .reg .b32 %r<5>; .reg .f32 %f<3>; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out]; ld.param.f32 %f1, [x]; ld.param.b32 %r1, [y]; ld.param.v2.u32 {%r2, %r3}, [z+0];
    st.global.f32 [%rd1], %f1; st.global.v2.u32 [%rd1+8], {%r2, %r3}; st.global.u32 [%rd1+4], %r1;
}"""
    from ptx import Memory

    memory = Memory()
    out = memory.zeros("out", 4, np.uint32)
    arguments = [out.ctypes.data, 1.5, np.float32(2.5), bytes(range(8))]
    Module(text).run(grid=1, block=1, arguments=arguments, memory=memory)
    assert out[:2].view(np.float32).tolist() == [1.5, 2.5] and out[2:].tobytes() == bytes(range(8))
