"""What the CUDA target tells a GPU: on a fake one, whose kernels obey the launch ABI and know
nothing else."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from cases import MASK_FORMS, Case, assert_close, bits, make_case, naming, run, same_bits, with_mask
from device_arrays import DeviceArray
from fake_gpu import buffer, case_of, install, on_gpu, planned
from ptx.device import FakeDriver, each_call

import numba_prefix as nbp
from numba_prefix.cuda.device.driver import LEGACY_STREAM, Driver
from numba_prefix.cuda.kernel.params import INTEGERS, Params, in_memory
from numba_prefix.cuda.kernels import is_aligned
from numba_prefix.inputs.arrays import Tensor
from numba_prefix.inputs.problem import static_problem
from numba_prefix.planning.params import FACTORS


def test_the_fake_has_the_drivers_methods() -> None:
    for name, method in inspect.getmembers(Driver, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(FakeDriver, name)) == inspect.signature(method), name


def test_parameters_in_memory() -> None:
    """A slot of 8 bytes each, in order: integers, and factors in the lower half of theirs."""
    values = [*range(-5, len(INTEGERS) - 5), *np.arange(0.25, len(FACTORS), 1, np.float32)]
    block = in_memory(Params._make(values))
    assert block.nbytes == 8 * len(Params._fields)
    slots = [block[i : i + 1] for i in range(len(block))]
    read = [
        slot.view(np.int64 if name in INTEGERS else np.float32)[0]
        for name, slot in zip(Params._fields, slots, strict=True)
    ]
    assert read == values


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, "float16") for form in MASK_FORMS),
        *((form, dtype) for form in ("causal", "alibi-template", "alibi-heads") for dtype in ("bfloat16", "float32")),
    ],
)
def test_results(fake: FakeDriver, form: str, dtype: str) -> None:
    case = with_mask(case_of(dtype), form, mask_dtype=dtype)
    out, lse = nbp.prefix_encoder(**on_gpu(fake, case), return_lse=True)
    assert type(out) is type(lse) is DeviceArray
    assert_close(out.array, case, lse.array)
    assert len(fake.launches) == 2


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_family(monkeypatch: pytest.MonkeyPatch, cc: tuple[int, int], dtype: str) -> None:
    fake = install(monkeypatch, cc=cc)
    _, op, _ = planned(fake, case_of(dtype))
    op.run(buffer(fake, op.workspace_size)[0])
    family = "mma" if cc >= (8, 0) and dtype == "float16" else "fma"
    assert [launch.kernel.split("_")[0] for launch in fake.launches] == [family, "merge"]
    assert (op.target, op.reason) == ("cuda", f"query is on cuda:0; family {family}, sm_{cc[0]}{cc[1]} (Test GPU 0)")


def test_parameters(fake: FakeDriver) -> None:
    """Every parameter of a launch against what the arrays say: strided views of larger arrays, none
    of them dense."""
    case = with_mask(case_of(), "alibi-heads", mask_dtype="float16")
    a = {name: value for name, value in case.arguments().items() if isinstance(value, np.ndarray)}
    wide = {
        name: np.zeros([2 * n for n in value.shape[:-1]] + [value.shape[-1]], value.dtype) for name, value in a.items()
    }
    for name, value in a.items():
        wide[name][tuple(slice(1, None, 2) for _ in value.shape[:-1])] = value
    given = {name: DeviceArray(fake, wide[name][tuple(slice(1, None, 2) for _ in a[name].shape[:-1])]) for name in a}
    out = DeviceArray(fake, np.full((39, 8, 64), np.nan, np.float16)[:, ::2, 16:48])
    size, op, _ = planned(fake, case, **given, out=out)
    workspace, _ = buffer(fake, size, begin=1)
    op.run(workspace)
    assert_close(out.array, case)
    launch, merge = fake.launches
    assert launch.params == merge.params
    params = launch.params._asdict()
    q, k, v, table, mask = (given[name].array for name in ("query", "key", "value", "block_tables", "mask"))
    expected = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "table_ptr": table, "mask_ptr": mask, "out_ptr": out.array}
    for name, array in expected.items():
        assert params.pop(name) == array.ctypes.data
    axes = {"q": q, "k": k, "v": v, "table": table, "mask": mask, "out": out.array}
    names = {"q": ("token", "head"), "k": ("block", "slot", "head"), "v": ("block", "slot", "head")}
    names |= {"table": ("row", "column"), "mask": ("head", "row", "column"), "out": ("token", "head")}
    for of, array in axes.items():
        for axis, stride in zip(names[of], array.strides, strict=False):
            assert params.pop(f"{of}_{axis}_stride") == stride, (of, axis)
    counts = {"kv_head_num": 2, "group_size": 2, "head_size": 32, "block_size": 16, "num_blocks": len(case.key)}
    counts |= {"tile_rows": 64, "has_shift": 0, "lse_ptr": 0, "slopes_ptr": 0}
    for name, value in counts.items():
        assert params.pop(name) == value, name
    assert params.pop("partials_ptr") == -(-workspace.array.ctypes.data // 64) * 64
    factors = {"qk_scale": case.qk_scale, "unit": 1, "unit_log2": 1.4426950408889634, "q_sign": 1}
    for name, factor in factors.items():
        assert params.pop(name) == np.float32(factor), name
    assert set(params) == {"work_ptr", "merge_ptr", "sequences_ptr", "runs_ptr", "status_ptr"}
    assert len(set(params.values())) == 5


def test_strides_beyond_4_gib(idle: FakeDriver) -> None:
    case = case_of()
    far = tuple(
        Tensor(name, None, "dlpack", 1 << 40, "float16", case.key.shape, (3 << 31, 5 << 32, 64, 1), "cuda:0", False)
        for name in ("key", "value")
    )
    planned(idle, case, key=far[0], value=far[1])[1].run()
    params = idle.launches[0].params
    assert params.k_ptr == 1 << 40
    assert (params.k_block_stride, params.k_slot_stride, params.k_head_stride) == (3 << 32, 5 << 33, 128)


def test_rebind(fake: FakeDriver) -> None:
    """One plan for other arrays, aligned or not; its tables are uploaded once."""
    first, second = case_of(), case_of(seed=1)
    second = Case(**{**vars(second), "block_tables": first.block_tables, "key": first.key, "value": first.value})
    _, op, _ = planned(fake, first)
    op.run()
    uploads = fake.names("to_device")
    shifted = np.zeros(second.query.size + 1, np.float16)[1:].reshape(second.query.shape)
    shifted[...] = second.query
    out = DeviceArray(fake, np.full(first.query.shape, np.nan, np.float16))
    assert op.rebind(query=DeviceArray(fake, shifted), attn_out=out) is op
    op.run()
    same_bits(out.array, run(Case(**{**vars(first), "query": second.query}), "auto", **on_gpu(fake, first) | {
        "query": DeviceArray(fake, second.query)}).array)  # fmt: skip
    assert fake.names("to_device")[: len(uploads)] == uploads
    kernels = [launch.kernel for launch in fake.launches[:4]]
    assert [kernel.endswith("_unaligned") for kernel in kernels] == [False, False, True, False]
    assert fake.launches[2].params.work_ptr == fake.launches[0].params.work_ptr


@pytest.mark.parametrize(
    ("head_size", "begin", "token", "expected"),
    [
        (32, 0, 64, True),
        (32, 4, 64, False),
        (32, 8, 72, True),
        (32, 0, 65, False),
        (36, 0, 80, False),
        (8, 0, 16, True),
    ],
)
def test_is_aligned(head_size: int, begin: int, token: int, expected: bool) -> None:
    """16-byte rows of all three arrays, in float16."""
    memory = np.zeros(20_000, np.float16)
    memory = memory[-memory.ctypes.data % 16 // 2 :]
    rows = np.lib.stride_tricks.as_strided(memory[begin:], (3, 1, head_size), (2 * token, 2, 2))
    cache = memory[: 4 * 16 * 2 * head_size].reshape(4, 16, 2, head_size)[:, :, :1]
    arguments = (rows, cache, cache, np.zeros((1, 4), np.int32))
    assert is_aligned(*static_problem(*arguments)) is expected
    if begin == 4:  # the same of keys and values
        shifted = memory[4:][: 4 * 16 * head_size].reshape(4, 16, 1, head_size)
        for key, value in ((shifted, cache), (cache, shifted)):
            assert not is_aligned(*static_problem(cache[:3, 0], key, value, arguments[3]))


def test_slopes(idle: FakeDriver) -> None:
    """In host memory: one copy for all layers. On the GPU: read there."""
    case = with_mask(case_of(), "alibi-generator")
    _, op, _ = planned(idle, case)
    for _ in range(3):
        op.rebind(slopes=case.slopes.copy()).run()
    assert len({launch.params.slopes_ptr for launch in idle.launches}) == 1
    copied = list(each_call(idle, "to_device"))
    assert sorted(num_bytes for _, _, num_bytes, _ in copied)[0] == case.slopes.nbytes
    assert len(copied) == 2
    there = DeviceArray(idle, case.slopes)
    op.rebind(slopes=there).run()
    assert idle.launches[-1].params.slopes_ptr == case.slopes.ctypes.data
    assert len(list(each_call(idle, "to_device"))) == 2


@pytest.mark.parametrize("begin", [0, 1, 63])
def test_workspace(fake: FakeDriver, begin: int) -> None:
    """Exact at any alignment around it touched, one byte less an error with both numbers."""
    case = case_of()
    size, op, out = planned(fake, case)
    assert size > 63
    workspace, whole = buffer(fake, size, begin)
    inside = workspace.array.ctypes.data - whole.ctypes.data
    nbp.self_attention_prefix_encoder(workspace, size, op)
    assert_close(out.array, case)
    assert (whole[:inside] == 0xAB).all() and (whole[inside + size :] == 0xAB).all()
    short, _ = buffer(fake, size - 1)
    for call in (lambda: op.run(short), lambda: nbp.self_attention_prefix_encoder(short, size, op)):
        with pytest.raises(ValueError, match=naming("workspace", size - 1, size)):
            call()
    with pytest.raises(ValueError, match=naming("workspace_size", size - 1, size)):
        nbp.self_attention_prefix_encoder(workspace, size - 1, op)
    with pytest.raises(ValueError, match=naming("workspace: got None", size)):
        nbp.self_attention_prefix_encoder(None, size, op)


def test_unfit_workspaces(idle: FakeDriver) -> None:
    size, op, _ = planned(idle, case_of())
    locked = np.zeros(size, np.uint8)
    locked.flags.writeable = False
    for unfit, what in (
        (bytearray(size), "bytearray in CPU memory"),
        (np.zeros(size, np.uint8), "cpu"),
        (DeviceArray(idle, locked, protocol="cuda"), "read-only"),
        (DeviceArray(idle, np.zeros((size, 2), np.uint8)[:, :1]), "strides"),
    ):
        with pytest.raises(ValueError, match=naming("workspace", what, "cuda:0")):
            op.run(unfit)
    with pytest.raises(TypeError, match="workspace"):
        op.run(object())
    assert idle.launches == []


def test_workspace_of_its_own(idle: FakeDriver) -> None:
    """Without one, memory is taken and given back on the run's stream."""
    size, op, _ = planned(idle, case_of(), nbp.Context(stream=77))
    idle.log.clear()
    op.run()
    assert idle.names("malloc", "launch", "free") == ["malloc", "launch", "launch", "free"]
    ((ordinal, num_bytes, stream),) = each_call(idle, "malloc")
    assert (ordinal, num_bytes, stream) == (0, size, 77)
    assert [stream for _, _, stream in each_call(idle, "free")] == [77]


def test_no_splits(fake: FakeDriver) -> None:
    case = make_case([5], [21], dtype="float16")
    size, op, out = planned(fake, case)
    nbp.self_attention_prefix_encoder(None, size, op)
    assert (size, len(fake.launches)) == (0, 1)
    assert_close(out.array, case)


@pytest.mark.parametrize("lengths", [([0, 0], [9, 0]), ([], [])])
def test_nothing_to_do(fake: FakeDriver, lengths: Any) -> None:
    case = make_case(*lengths, dtype="float16")
    out, lse = nbp.prefix_encoder(**on_gpu(fake, case), return_lse=True)
    assert out.shape == case.query.shape and lse.shape == case.query.shape[:2]
    assert fake.launches == []


def test_a_run_only_launches(idle: FakeDriver) -> None:
    size, op, _ = planned(idle, case_of(), nbp.Context(stream=5))
    workspace, _ = buffer(idle, size)
    op.run(workspace)
    idle.log.clear()
    op.run(workspace)
    assert idle.names() == ["current_context", "push", "launch", "launch", "pop"]
    idle.push(1000)  # the device's own, as after any call of torch
    idle.log.clear()
    op.run(workspace)
    assert idle.names() == ["current_context", "launch", "launch"]


def test_too_many_tiles(idle: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba_prefix.cuda.plan.MAX_GRID", 9)
    with pytest.raises(ValueError, match=naming("seq_len", "tiles", 9)):
        planned(idle, case_of())


def test_strided_heads(fake: FakeDriver) -> None:
    """Arrays whose last axis is strided are copied at every run, if their library can; an output is
    not."""
    case = make_case([5, 33], [21, 150], dtype="float16", head_size=32)
    spread = np.zeros((*case.query.shape[:-1], 64), np.float16)
    query = DeviceArray(fake, spread[..., ::2])
    _, op, out = planned(fake, case, query=query)
    query.array[...] = case.query
    op.run()
    assert_close(out.array, case)
    thin = DeviceArray(fake, np.zeros_like(spread)[..., ::2])
    with pytest.raises(ValueError, match="out: got stride 2"):
        op.rebind(attn_out=thin).run()


def test_interface_objects(fake: FakeDriver) -> None:
    """Arrays with nothing but the CUDA array interface: an output has to be given."""
    case = make_case([5, 33], [21, 150], dtype="float16", head_size=32)
    given = on_gpu(fake, case, protocol="cuda")
    out = DeviceArray(fake, np.full(case.query.shape, np.nan, np.float16), protocol="cuda")
    assert nbp.prefix_encoder(**given, out=out) is out
    assert_close(out.array, case)
    with pytest.raises(TypeError, match="query: got DeviceArray, which can't allocate"):
        nbp.prefix_encoder(**given)


def test_second_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, num_devices=2)
    case = make_case([5, 33], [21, 150], dtype="float16", head_size=32)
    given = on_gpu(fake, case, ordinal=1)
    fake.log.clear()
    out = nbp.prefix_encoder(**given)
    assert_close(out.array, case)
    assert {context for (context,) in each_call(fake, "push")} == {1001}
    assert {arguments[0] for arguments in each_call(fake, "malloc", "free")} == {1}
    for name in ("key", "value", "block_tables"):
        with pytest.raises(ValueError, match=naming(name, "cuda:0", "cuda:1")):
            nbp.prefix_encoder(**given | {name: DeviceArray(fake, getattr(case, name))})


def test_targets_do_not_mix(fake: FakeDriver) -> None:
    case = case_of()
    with pytest.raises(ValueError, match=naming("query", "memory on cpu", "CUDA memory")):
        nbp.prefix_encoder(**case.arguments(), target="cuda")
    for target in ("cpu", "reference"):
        with pytest.raises(ValueError, match=naming("query", "cuda:0", "CPU memory")):
            nbp.prefix_encoder(**on_gpu(fake, case), target=target)
    assert bits(nbp.prefix_encoder(**on_gpu(fake, case), target="cuda").array).size


def test_streams_are_in_order(idle: FakeDriver) -> None:
    """LEGACY_STREAM is where arrays without a word about streams are ready, and where they are
    used."""
    nbp.prefix_encoder(**on_gpu(idle, case_of()))
    assert {launch.stream for launch in idle.launches} == {LEGACY_STREAM}


def test_command_line(fake: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    """Files and trials are in CPU memory: for this target they are copied to the GPU, and
    judged."""
    from numba_prefix.cli.app import main

    report = nbp.warmup("cuda", head_sizes=20, dtypes=["bfloat16", "float32"], mask_types=["causal", "alibi_sqrt"])
    assert report["ok"] and len(report["checks"]) == 4
    assert report["reason"] == "asked for; family mma, sm_80 (Test GPU 0)"
    assert main(["run", "--target", "cuda"]) == 0
    assert "within the error budget" in capsys.readouterr().out
