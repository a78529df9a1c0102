"""A fake GPU in place of the process's own, and problems for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import standins
from cases import Case, make_case
from device_arrays import DeviceArray
from ptx.device import FakeDriver, interpreted

import numba_prefix as nbp
from numba_prefix.cuda.compile import cubins
from numba_prefix.cuda.device import driver

# One sequence long enough for its keys to be split, an empty one, and one whose rows are not whole
# tiles.
LENGTHS = ([5, 0, 33, 1], [21, 7, 150, 2100])
SHORT = ([5, 0, 33, 1], [21, 7, 150, 90])


def install(monkeypatch: Any, **options: Any) -> FakeDriver:
    """A fake driver; its kernels are the stand-ins unless it interprets real ones."""
    fake = FakeDriver(**({"execute": standins.execute} | options))
    monkeypatch.setattr(driver, "_driver", fake)
    if fake.execute is not interpreted:
        monkeypatch.setattr(cubins, "kernel", standins.compile_kernel)
    return fake


def case_of(dtype: str = "float16", lengths: Any = LENGTHS, **changes: Any) -> Case:
    sizes = {"head_num": 4, "kv_head_num": 2, "head_size": 32} | changes
    return make_case(*lengths, dtype=dtype, **sizes)


def spoilt(case: Case) -> Case:
    """With a block id that does not exist."""
    tables = case.block_tables.copy()
    tables[2, 1] = 9999
    return Case(**{**vars(case), "block_tables": tables})


def on_gpu(fake: FakeDriver, case: Case, **options: Any) -> dict[str, Any]:
    """A case's arguments, its arrays on the GPU but for the slopes."""
    return {
        name: DeviceArray(fake, value, **options) if isinstance(value, np.ndarray) and name != "slopes" else value
        for name, value in case.arguments().items()
    }


def planned(
    fake: FakeDriver, case: Case, context: nbp.Context | None = None, **changes: Any
) -> tuple[int, nbp.Op, Any]:
    """The first phase: workspace size, operation, output."""
    a = on_gpu(fake, case) | changes
    out = a.get("out") or DeviceArray(fake, np.full(case.query.shape, np.nan, case.query.dtype))
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        a["query"], a["key"], a["value"], a["block_tables"], a["mask"], a["seq_len"], a["kv_seq_len"], a["slopes"],
        a["mask_type"], case.query.shape[1], case.key.shape[2], case.qk_scale, out, context,
    )  # fmt: skip
    return size, op, out


def buffer(fake: FakeDriver, num_bytes: int, begin: int = 0) -> tuple[DeviceArray, np.ndarray]:
    """A workspace that begins `begin` bytes after a multiple of 64, within what is returned too."""
    whole = np.full(num_bytes + 256, 0xAB, np.uint8)
    skip = -whole.ctypes.data % 64 + begin
    return DeviceArray(fake, whole[skip : skip + num_bytes]), whole
