"""The checks: tiny programs with one fault each, and their correct twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ptx
from ptx import Memory, Module
from ptx.text import entry, run

SHARED = ".extern .shared .align 16 .b8 s[];"
# %r1: the thread's word in shared memory; %r3: its neighbour's; %r5: that of the thread 32 on, of
# two warps.
PLACES = """
    mov.u32 %r9, s; mad.lo.u32 %r1, %r0, 4, %r9; xor.b32 %r2, %r0, 1; mad.lo.u32 %r3, %r2, 4, %r9;
    xor.b32 %r4, %r0, 32; mad.lo.u32 %r5, %r4, 4, %r9; mad.lo.u32 %r6, %r0, 16, %r9;
    mul.wide.u32 %rd9, %r0, 16; add.s64 %rd10, %rd0, %rd9; mul.wide.u32 %rd11, %r0, 4; add.s64 %rd12, %rd0, %rd11;
    setp.lt.u32 %p1, %r0, 32; setp.lt.u32 %p2, %r0, 5; setp.eq.u32 %p3, %r0, 7;
"""
COPY = "cp.async.cg.shared.global [%r6], [%rd10], 16; cp.async.commit_group;"
ALL = "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r6];"
NEIGHBOUR = "xor.b32 %r7, %r0, 33; mad.lo.u32 %r7, %r7, 16, %r9; ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r7];"
MMA = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r10,%r11}, {%r12}, {%f1,%f2,%f3,%f4};"
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10,%r11,%r12,%r13}, [%r6];"
FILL = "st.shared.v4.u32 [%r6], {0, 0, 0, 0};"

# name: (fault, what it says, the faulty program, the correct one)
FAULTS: dict[str, tuple[type[ptx.Fault], str, str, str]] = {
    "a read of another warp's word without a barrier": (
        *(ptx.SharedRace, r"is read, thread \d+ wrote it"),
        "st.shared.u32 [%r1], %r0; ld.shared.u32 %r10, [%r5];",
        "st.shared.u32 [%r1], %r0; bar.sync 0; ld.shared.u32 %r10, [%r5];",
    ),
    "a read of the same warp's word without a warp barrier": (
        *(ptx.SharedRace, r"is read, thread \d+ wrote it"),
        "st.shared.u32 [%r1], %r0; ld.shared.u32 %r10, [%r3];",
        "st.shared.u32 [%r1], %r0; bar.warp.sync -1; ld.shared.u32 %r10, [%r3];",
    ),
    "a warp barrier where another warp's word is read": (
        *(ptx.SharedRace, r"is read, thread \d+ wrote it"),
        "st.shared.u32 [%r1], %r0; bar.warp.sync -1; ld.shared.u32 %r10, [%r5];",
        "st.shared.u32 [%r1], %r0; barrier.sync 1, 64; ld.shared.u32 %r10, [%r5];",
    ),
    "a buffer used again before all have read it": (
        *(ptx.SharedRace, r"is written, a thread of warp \d read it"),
        "st.shared.u32 [%r1], %r0; bar.sync 0; ld.shared.u32 %r10, [%r5]; st.shared.u32 [%r1], %r10;",
        "st.shared.u32 [%r1], %r0; bar.sync 0; ld.shared.u32 %r10, [%r5]; bar.sync 0; st.shared.u32 [%r1], %r10;",
    ),
    "a neighbour's word overwritten after it was read": (
        *(ptx.SharedRace, r"is written, a thread of warp \d read it"),
        "st.shared.u32 [%r1], %r0; bar.sync 0; ld.shared.u32 %r10, [%r3]; st.shared.u32 [%r1], %r10;",
        "st.shared.u32 [%r1], %r0; bar.sync 0; ld.shared.u32 %r10, [%r1]; st.shared.u32 [%r1], %r10;",
    ),
    "one word read by many and then written": (
        *(ptx.SharedRace, r"is written, a thread of warp \d read it"),
        "@%p3 st.shared.u32 [%r9], %r0; bar.sync 0; ld.shared.u32 %r10, [%r9]; @%p3 st.shared.u32 [%r9], %r10;",
        "@%p3 st.shared.u32 [%r9], %r0; bar.sync 0; @%p3 ld.shared.u32 %r10, [%r9]; @%p3 st.shared.u32 [%r9], %r10;",
    ),
    "one word read by all lanes of one warp and then written by the last": (
        *(ptx.SharedRace, r"is written, a thread of warp 0 read it"),
        "@!%p1 bra $A; setp.eq.u32 %p4, %r0, 31; @%p4 st.shared.u32 [%r9], 1; bar.warp.sync -1; ld.shared.u32 %r10, [%r9];"
        "@%p4 st.shared.u32 [%r9], 0; $A:",
        "@!%p1 bra $A; setp.eq.u32 %p4, %r0, 31; @%p4 st.shared.u32 [%r9], 1; bar.warp.sync -1; ld.shared.u32 %r10, [%r9];"
        "bar.warp.sync -1; @%p4 st.shared.u32 [%r9], 0; $A:",
    ),
    "all threads write one word": (
        *(ptx.SharedRace, r"is written, also by thread \d+"),
        "st.shared.u32 [%r9], 5;",
        "@%p3 st.shared.u32 [%r9], 5;",
    ),
    "two warps write one word": (
        *(ptx.SharedRace, r"is written, thread \d+ wrote it"),
        "@%p3 st.shared.u32 [%r9], 5; setp.eq.u32 %p4, %r0, 40; @%p4 st.shared.u32 [%r9], 5;",
        "@%p3 st.shared.u32 [%r9], 5; setp.eq.u32 %p4, %r0, 40; bar.sync 0; @%p4 st.shared.u32 [%r9], 5;",
    ),
    "an atomic and a plain read": (
        *(ptx.SharedRace, r"is read, thread \d+ wrote it"),
        "@%p3 st.shared.u32 [%r9], 0; bar.sync 0; red.shared.add.u32 [%r9], 1; ld.shared.u32 %r10, [%r9];",
        "@%p3 st.shared.u32 [%r9], 0; bar.sync 0; red.shared.add.u32 [%r9], 1;"
        "red.shared.add.u32 [%r9], 1; bar.sync 0; ld.shared.u32 %r10, [%r9];",
    ),
    "ldmatrix of rows that other lanes have just written": (
        *(ptx.SharedRace, r"is read, thread \d+ wrote it"),
        FILL + LDMATRIX,
        FILL + "bar.warp.sync -1;" + LDMATRIX,
    ),
    "a read of words never written": (
        *(ptx.Uninitialized, "before it was written"),
        "@%p1 st.shared.u32 [%r1], %r0; bar.sync 0; ld.shared.u32 %r10, [%r1];",
        "@%p1 st.shared.u32 [%r1], %r0; bar.sync 0; @%p1 ld.shared.u32 %r10, [%r1];",
    ),
    "a copy read without a wait": (
        *(ptx.InFlight, r"thread \d+'s cp.async is in flight"),
        COPY + "bar.sync 0;" + ALL + "cp.async.wait_all;",
        COPY + "cp.async.wait_group 0;" + ALL,
    ),
    "a copy read by others after the wait but before a barrier": (
        *(ptx.SharedRace, r"is read, thread \d+ wrote it"),
        COPY + "cp.async.wait_group 0;" + NEIGHBOUR,
        COPY + "cp.async.wait_group 0; bar.sync 0;" + NEIGHBOUR,
    ),
    "a barrier before the wait": (
        *(ptx.SharedRace, r"is read, thread \d+ wrote it"),
        COPY + "bar.sync 0; cp.async.wait_group 0;" + NEIGHBOUR,
        COPY + "cp.async.wait_group 0; bar.sync 0;" + NEIGHBOUR,
    ),
    "a wait that leaves the group open": (
        *(ptx.InFlight, "in flight"),
        COPY + "cp.async.wait_group 1;" + ALL + "cp.async.wait_all;",
        COPY + "cp.async.commit_group; cp.async.wait_group 1;" + ALL,
    ),
    "a copy that was never committed": (
        *(ptx.InFlight, "in flight"),
        "cp.async.cg.shared.global [%r6], [%rd10], 16; cp.async.wait_group 0;" + ALL,
        "cp.async.cg.shared.global [%r6], [%rd10], 16; cp.async.wait_all;" + ALL,
    ),
    "a store to where a copy will land": (
        *(ptx.InFlight, "in flight"),
        COPY + "st.shared.u32 [%r6], 1; cp.async.wait_all;",
        COPY + "cp.async.wait_all; st.shared.u32 [%r6], 1;",
    ),
    "a second copy to the same place": (
        *(ptx.InFlight, "in flight"),
        COPY + COPY + "cp.async.wait_all;",
        COPY + "cp.async.wait_all;" + COPY + "cp.async.wait_all;",
    ),
    "a source that changes before the copy has landed": (
        *(ptx.InFlight, "was changed"),
        COPY + "st.global.u32 [%rd10], 99; cp.async.wait_all;",
        COPY + "cp.async.wait_all; st.global.u32 [%rd10], 99;",
    ),
    "a copy into a buffer that others still read": (
        *(ptx.SharedRace, r"is written, a thread of warp \d read it"),
        FILL + "bar.sync 0;" + NEIGHBOUR + COPY + "cp.async.wait_all;",
        FILL + "bar.sync 0;" + NEIGHBOUR + "bar.sync 0;" + COPY + "cp.async.wait_all;",
    ),
    "the end while copies are in flight": (ptx.InFlight, "ended before", COPY, COPY + "cp.async.wait_all;"),
    "a misaligned global address": (
        *(ptx.Misaligned, "no multiple of 16"),
        "ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd10+8];",
        "ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd10+16];",
    ),
    "a misaligned shared address": (
        *(ptx.Misaligned, "no multiple of 16"),
        "st.shared.v4.u32 [%r6+4], {0, 0, 0, 0};",
        "st.shared.v4.u32 [%r6+16], {0, 0, 0, 0};",
    ),
    "a misaligned source of a copy": (
        *(ptx.Misaligned, "no multiple of 16"),
        "cp.async.cg.shared.global [%r6], [%rd10+8], 16; cp.async.wait_all;",
        "cp.async.ca.shared.global [%r6], [%rd10+8], 8; cp.async.wait_all;",
    ),
    "a misaligned source of which nothing is read": (
        *(ptx.Misaligned, "no multiple of 16"),
        "cp.async.cg.shared.global [%r6], [%rd10+8], 16, 0; cp.async.wait_all;",
        "cp.async.cg.shared.global [%r6], [%rd10+16], 16, 0; cp.async.wait_all;",
    ),
    "a global address past the end": (
        *(ptx.MemoryFault, r"nearest is array 0 .*, byte 2048 of it, 0 bytes past its end"),
        "ld.global.u32 %r10, [%rd12+1796];",
        "ld.global.u32 %r10, [%rd12+1792];",
    ),
    "a global address before the start": (
        *(ptx.MemoryFault, "4 bytes after"),
        "ld.global.u32 %r10, [%rd12+-4];",
        "@!%p2 ld.global.u32 %r10, [%rd12+-4];",
    ),
    "a wild address": (ptx.MemoryFault, "0x10;", "mov.u64 %rd5, 16; ld.global.u32 %r10, [%rd5];", "mov.u64 %rd5, 16;"),
    "a shared address past the end": (
        *(ptx.SharedBounds, "shared address"),
        "st.shared.u32 [%r1+1796], 1;",
        "st.shared.u32 [%r1+1792], 1;",
    ),
    "a barrier that a part of a warp reaches": (
        *(ptx.Divergence, "lane 5 of its warp is elsewhere"),
        "@%p2 bra $A; bra $B; $A: bar.sync 0; $B:",
        "@%p1 bra $A; bra $B; $A: bar.sync 0; bra $C; $B: bar.sync 0; $C:",
    ),
    "ldmatrix reached by a part of a warp": (
        *(ptx.Divergence, "elsewhere"),
        FILL + "bar.sync 0; @%p2 bra $A; bra $B; $A: " + LDMATRIX + " $B:",
        FILL + "bar.sync 0; @%p1 bra $A; bra $B; $A: " + LDMATRIX + " $B:",
    ),
    "mma reached by a part of a warp": (
        *(ptx.Divergence, "elsewhere"),
        f"@%p2 bra $A; bra $B; $A: {MMA} $B:",
        f"@%p1 bra $A; bra $B; $A: {MMA} $B:",
    ),
    "mma in a warp of which lanes have exited": (ptx.Divergence, "has exited", f"@%p2 ret; {MMA}", f"@%p1 ret; {MMA}"),
    "a shuffle whose members are not all there": (
        *(ptx.Divergence, "members are 0xffffffff, but the warp's lanes here are 0x0000001f"),
        "@%p2 bra $A; bra $B; $A: shfl.sync.bfly.b32 %r10, %r0, 1, 31, -1; $B:",
        "@%p2 bra $A; bra $B; $A: shfl.sync.idx.b32 %r10, %r0, 1, 31, 31; $B:",
    ),
    "a shuffle from a lane that takes no part": (
        *(ptx.Divergence, "it reads lane 6, which takes no part"),
        "@%p2 bra $A; bra $B; $A: shfl.sync.idx.b32 %r10, %r0, 6, 31, 31; $B:",
        "@%p2 bra $A; bra $B; $A: shfl.sync.idx.b32 %r10, %r0, 4, 31, 31; $B:",
    ),
    "two warps at different barriers": (
        *(ptx.Deadlock, "32 threads at line"),
        "@%p1 bra $A; bar.sync 1; bra $B; $A: bar.sync 2; $B:",
        "@%p1 bra $A; bar.sync 1; bra $B; $A: bar.sync 1; $B:",
    ),
    "a barrier for more threads than there are": (ptx.Deadlock, "64 threads", "bar.sync 1, 96;", "bar.sync 1, 64;"),
    "a loop that never ends": (ptx.Deadlock, "still running", "$A: bra.uni $A;", "bra.uni $A; $A:"),
    "the same global word stored to by all, with different values": (
        *(ptx.GlobalRace, "by another thread"),
        "st.global.u32 [%rd0], %r0;",
        "st.global.u32 [%rd0], 1;",
    ),
    "a constant load of what was stored": (
        *(ptx.GlobalRace, "loaded as constant"),
        "st.global.u32 [%rd12], %r0; ld.global.nc.u32 %r10, [%rd12];",
        "st.global.u32 [%rd12], %r0; ld.global.u32 %r10, [%rd12];",
    ),
    "a trap": (ptx.Fault, "stops itself", "@%p3 trap;", "@%p3 bra $A; $A:"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_seen_and_its_correct_twin_runs(name: str) -> None:
    kind, message, wrong, right = FAULTS[name]
    for body, is_wrong in ((wrong, True), (right, False)):
        memory = Memory()
        array = memory.zeros("array 0", 512, np.uint32)
        module = Module(entry(PLACES + body, "array", SHARED))
        launch: dict[str, Any] = {
            "grid": 1,
            "block": 64,
            "shared_bytes": 2048,
            "arguments": [array.ctypes.data],
            "memory": memory,
        }
        if is_wrong:
            with pytest.raises(kind, match=message) as caught:
                module.run("k", max_steps=2000, **launch)
            assert type(caught.value) is kind
            assert "k, PTX line" in str(caught.value) and ", block 0, thread" in str(caught.value)
        else:
            module.run("k", **launch)


def test_what_is_ordered_by_way_of_a_third_warp() -> None:
    """Warps 0 and 1 meet, then 1 and 2: what 0 wrote is visible to 2. If 1 meets 2 first, it
    isn't."""
    body = """
        mov.u32 %r1, s; shr.u32 %r2, %r0, 5; setp.eq.u32 %p0, %r2, 0; setp.eq.u32 %p1, %r2, 1; setp.eq.u32 %p2, %r2, 2;
        setp.eq.u32 %p3, %r0, 0; @%p3 st.shared.u32 [%r1], 7;
        @%p0 bra $ZERO; @%p1 bra $ONE;
        barrier.sync SECOND, 64; ld.shared.u32 %r3, [%r1]; bra.uni $END;
        $ZERO: barrier.sync 1, 64; bra.uni $END;
        $ONE: barrier.sync FIRST, 64; barrier.sync OTHER, 64;
        $END:
    """
    right = body.replace("SECOND", "2").replace("FIRST", "1").replace("OTHER", "2")
    run(entry(right, "", SHARED), block=96, shared_bytes=16)
    wrong = body.replace("SECOND", "2").replace("FIRST", "2").replace("OTHER", "1")
    with pytest.raises(ptx.SharedRace, match="is read, thread 0 wrote it"):
        run(entry(wrong, "", SHARED), block=96, shared_bytes=16)
