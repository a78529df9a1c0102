"""The PTX interpreter as a whole: device memory, launches, counts, and kernels as Numba compiles
them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ptx
from ptx import Memory, Module
from ptx.text import entry, run

SHARED = ".extern .shared .align 128 .b8 s[];"
INDEX = "mov.u32 %r20, %ctaid.x; mad.lo.u32 %r21, %r20, 32, %r0; mul.wide.u32 %rd9, %r21, 4;"


def launch(body: str, memory: Memory, arguments: list[int], **options: Any) -> ptx.Statistics:
    names = " ".join(f"p{i}" for i in range(len(arguments)))
    text = entry(INDEX + body, names, SHARED)
    return Module(text).run(arguments=arguments, memory=memory, **{"grid": 1, "block": 32, **options})


COPY = "add.s64 %rd10, %rd0, %rd9; ld.global.u32 %r1, [%rd10]; add.s64 %rd11, %rd1, %rd9; st.global.u32 [%rd11], %r1;"


def test_stores_to_read_only_arrays() -> None:
    source, target = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    memory = Memory()
    memory.add("source", source, writable=False)
    memory.add("target", target)
    launch(COPY, memory, [source.ctypes.data, target.ctypes.data])
    np.testing.assert_array_equal(source, target)
    with pytest.raises(ptx.MemoryFault, match="a store to read-only 4 bytes .* source"):
        launch(COPY, memory, [target.ctypes.data, source.ctypes.data])
    source.flags.writeable = False
    memory.remove("source")
    memory.add("frozen", source)
    with pytest.raises(ptx.MemoryFault, match="read-only .* frozen"):
        launch(COPY, memory, [target.ctypes.data, source.ctypes.data])
    with pytest.raises(ValueError, match="frozen is read-only"):
        memory.add("frozen", source, writable=True)
    with pytest.raises(KeyError):
        memory.remove("source")
    with pytest.raises(TypeError, match="no NumPy array"):
        memory.add("list", [1, 2])  # type: ignore[arg-type]


def test_strided_arrays_own_only_their_elements() -> None:
    both = np.arange(64, dtype=np.uint32).reshape(32, 2)
    target = np.zeros(32, np.uint32)
    memory = Memory()
    memory.add("even", both[:, 0])
    memory.add("target", target)
    pairs = COPY.replace("%rd0, %rd9", "%rd0, %rd9; add.s64 %rd10, %rd10, %rd9")
    launch(pairs, memory, [both.ctypes.data, target.ctypes.data])
    np.testing.assert_array_equal(target, both[:, 0])
    with pytest.raises(ptx.MemoryFault, match="even .*, byte 4 of it, inside"):
        launch(COPY, memory, [both.ctypes.data, target.ctypes.data])
    # Two views of one array, of which one is read-only.
    memory.add("odd", both[:, 1], writable=False)
    launch(COPY, memory, [both.ctypes.data, target.ctypes.data])
    with pytest.raises(ptx.MemoryFault, match=r"4 bytes .* even \[.* \+ odd"):
        launch(COPY, memory, [target.ctypes.data, both.ctypes.data])


def test_one_request_may_touch_several_arrays() -> None:
    memory = Memory()
    parts = [memory.zeros(f"part {i}", 16, np.uint32) for i in range(2)]
    target = memory.zeros("target", 32, np.uint32)
    parts[0][:], parts[1][:] = 3, 4
    body = "setp.lt.u32 %p1, %r0, 16; selp.b64 %rd0, %rd0, %rd2, %p1;" + COPY
    launch(body, memory, [parts[0].ctypes.data, target.ctypes.data, parts[1].ctypes.data - 64])
    assert target.tolist() == [3] * 16 + [4] * 16


def test_arrays_not_written_yet() -> None:
    memory = Memory()
    scratch = memory.zeros("scratch", 32, np.uint32, is_filled=False)
    target = memory.zeros("target", 32, np.uint32)
    with pytest.raises(ptx.Uninitialized, match="scratch .* is read before it was written"):
        launch(COPY, memory, [scratch.ctypes.data, target.ctypes.data])
    launch(COPY, memory, [target.ctypes.data, scratch.ctypes.data])
    memory.zeros("another", 1, np.uint32)
    launch(COPY, memory, [scratch.ctypes.data, target.ctypes.data])


def test_blocks_of_a_launch_exchange_nothing() -> None:
    memory = Memory()
    array = memory.zeros("array", 64, np.uint32)
    exchange = "xor.b32 %r22, %r21, 32; mul.wide.u32 %rd12, %r22, 4; add.s64 %rd13, %rd0, %rd12;"
    store = "add.s64 %rd10, %rd0, %rd9; st.global.u32 [%rd10], %r21;"
    arguments = [array.ctypes.data]
    with pytest.raises(ptx.GlobalRace, match="was stored by another block"):
        launch(exchange + store + "ld.global.u32 %r1, [%rd13];", memory, arguments, grid=2)
    launch(exchange + store + "ld.volatile.global.u32 %r1, [%rd13];", memory, arguments, grid=2)
    launch(exchange + "ld.global.u32 %r1, [%rd13];", memory, arguments, grid=2)  # an earlier launch's
    for lanes in (32, 64):  # one block after the other, and both together
        with pytest.raises(ptx.GlobalRace, match="by another thread"):
            launch("st.global.u32 [%rd0], %r20;", memory, arguments, grid=2, lanes=lanes)
    launch("mov.u32 %r20, 1; st.global.u32 [%rd0], %r20;", memory, arguments, grid=40)  # all the same value
    launch("red.global.add.u32 [%rd0], 1;", memory, arguments, grid=2)
    assert array[0] == 65


def test_faults_name_block_and_thread() -> None:
    memory = Memory()
    array = memory.zeros("array", 32 * 5, np.uint32)
    with pytest.raises(
        ptx.MemoryFault, match=r"k, PTX line \d+, block 5, thread 0: 4 bytes .* 0 bytes past its end\n  ld.global"
    ):
        launch("add.s64 %rd10, %rd0, %rd9; ld.global.u32 %r1, [%rd10];", memory, [array.ctypes.data], grid=9)


def test_launches_that_do_not_fit() -> None:
    module = Module(entry("", "p", SHARED, directives=".maxntid 64"))
    good: dict[str, Any] = {"grid": 1, "block": 32, "arguments": [0]}
    module.run(**good)
    for wrong, message in (
        ({"block": 96}, "96 threads in a block, at most 64"),
        ({"arguments": []}, "0 arguments for 1 parameters"),
        ({"arguments": [1.0]}, "a float for parameter p"),
        ({"arguments": [2**64]}, "doesn't fit parameter p"),
        ({"grid": 0}, "grid"),
        ({"grid": (1, 65536)}, "grid"),
        ({"shared_bytes": 164 * 1024}, "at most 166912"),
        ({"name": "other"}, "no kernel other among k"),
    ):
        with pytest.raises(ptx.LaunchFault, match=message):
            module.run(**{**good, **wrong})


def test_what_orders_a_warp() -> None:
    """bar.warp.sync does; that a shuffle does too must be asked for."""
    body = "mov.u32 %r1, s; mad.lo.u32 %r2, %r0, 4, %r1; xor.b32 %r3, %r0, 1; mad.lo.u32 %r3, %r3, 4, %r1;"
    body += "st.shared.u32 [%r2], %r0; shfl.sync.bfly.b32 %r4, %r0, 1, 31, -1; ld.shared.u32 %r5, [%r3];"
    run(entry(body, "", SHARED), shared_bytes=128, is_strict=False)
    with pytest.raises(ptx.SharedRace):
        run(entry(body, "", SHARED), shared_bytes=128)
    run(entry(body.replace("shfl", "bar.warp.sync -1; shfl"), "", SHARED), shared_bytes=128)


def test_dynamic_shared_memory_is_aligned_as_declared_and_no_better() -> None:
    body = "mov.u32 %r1, s; st.shared.v4.u32 [%r1], {0, 0, 0, 0};"
    run(entry(body, "", ".extern .shared .align 16 .b8 s[];"), block=1, shared_bytes=16)
    with pytest.raises(ptx.Misaligned):
        run(entry(body, "", ".extern .shared .align 8 .b8 s[];"), block=1, shared_bytes=16)


# Address of a lane's access (%r0 the lane, %r1 the start), access, the passes it needs and those it
# takes more.
CONFLICTS = [
    ("mad.lo.u32 %r2, %r0, 4, %r1;", "st.shared.u32 [%r2], 0;", 1, 0),
    ("mad.lo.u32 %r2, %r0, 8, %r1;", "st.shared.u32 [%r2], 0;", 1, 1),
    ("mad.lo.u32 %r2, %r0, 128, %r1;", "st.shared.u32 [%r2], 0;", 1, 31),
    ("mad.lo.u32 %r2, %r0, 132, %r1;", "st.shared.u32 [%r2], 0;", 1, 0),
    ("mad.lo.u32 %r2, %r0, 8, %r1;", "st.shared.v2.u32 [%r2], {0, 0};", 2, 0),
    ("mad.lo.u32 %r2, %r0, 16, %r1;", "st.shared.v4.u32 [%r2], {0, 0, 0, 0};", 4, 0),
    ("mad.lo.u32 %r2, %r0, 32, %r1;", "st.shared.v4.u32 [%r2], {0, 0, 0, 0};", 4, 4),
    ("mad.lo.u32 %r2, %r0, 144, %r1;", "st.shared.v4.u32 [%r2], {0, 0, 0, 0};", 4, 0),
    ("mov.u32 %r2, %r1;", "ld.shared.u32 %r3, [%r2];", 1, 0),
    ("and.b32 %r2, %r0, 1; mad.lo.u32 %r2, %r2, 128, %r1;", "ld.shared.u32 %r3, [%r2];", 1, 1),
    ("mad.lo.u32 %r2, %r0, 16, %r1;", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3,%r4,%r5,%r6}, [%r2];", 4, 0),
    ("mad.lo.u32 %r2, %r0, 128, %r1;", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3,%r4,%r5,%r6}, [%r2];", 4, 28),
    ("mad.lo.u32 %r2, %r0, 128, %r1;", "setp.lt.u32 %p1, %r0, 3; @%p1 ld.shared.u32 %r3, [%r2];", 1, 2),
]


@pytest.mark.parametrize("place,access,least,extra", CONFLICTS)
def test_bank_conflicts(place: str, access: str, least: int, extra: int) -> None:
    fill = "mov.u32 %r10, s; mad.lo.u32 %r11, %r0, 16, %r10; mov.u32 %r12, 0;"
    fill += "$F: st.shared.v4.u32 [%r11], {0, 0, 0, 0}; add.u32 %r11, %r11, 512; add.u32 %r12, %r12, 1;"
    fill += "setp.lt.u32 %p2, %r12, 10; @%p2 bra $F; bar.sync 0; mov.u32 %r1, s;\n"
    statistics = run(entry(fill + place + "\n" + access, "", SHARED), shared_bytes=5120)
    assert sum(statistics.bank_conflicts.values()) == extra
    assert statistics.wavefronts.total() == 10 * 4 + least + extra


@pytest.mark.parametrize("step,sectors,least", [(0, 1, 1), (4, 4, 4), (8, 8, 4), (32, 32, 4), (36, 32, 4)])
def test_sectors_of_global_memory(step: int, sectors: int, least: int) -> None:
    memory = Memory()
    array = memory.zeros("array", 1024, np.uint32)
    body = f"mul.wide.u32 %rd10, %r0, {step}; add.s64 %rd11, %rd0, %rd10; ld.global.u32 %r1, [%rd11];"
    statistics = launch(body, memory, [array.ctypes.data], grid=3)
    assert statistics.sectors_read == 3 * sectors and statistics.least_sectors_read == 3 * least
    assert statistics.num_bytes == {"global read": 3 * 128} and not statistics.sectors_written
    assert statistics.instructions["ld.global.u32"] == 3
    total = ptx.Statistics()
    total.add(statistics)
    total.add(statistics)
    assert total.sectors_read == 6 * sectors and total.num_instructions == 2 * statistics.num_instructions
