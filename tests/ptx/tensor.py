"""ldmatrix, stmatrix and mma.sync.

Products are exact and summed exactly (in float64) in steps of 8 along k; after each step the sum is truncated towards zero
to float32. That is how tensor cores have been measured to behave (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor
cores"), on the side of their larger errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .access import _check_address, addresses_of
from .arithmetic import NAN, widen_bf16
from .forms import Form, Plan, Step, handles
from .operands import Immediate, Register
from .parse import Instruction
from .races import MANY
from .warp import whole_warps

STEP = 8
_GROUP, _PLACE = np.arange(32) // 4, np.arange(32) % 4


def a_places(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each 16-bit element that lane, register, half of the 16 x k fragment A holds."""
    lane, register, half = np.meshgrid(np.arange(32), np.arange(k // 4), np.arange(2), indexing="ij")
    return lane // 4 + 8 * (register % 2), lane % 4 * 2 + half + 8 * (register // 2)


def b_places(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Likewise of the k x 8 fragment B."""
    lane, register, half = np.meshgrid(np.arange(32), np.arange(k // 8), np.arange(2), indexing="ij")
    return lane % 4 * 2 + half + 8 * register, lane // 4


def c_places() -> tuple[np.ndarray, np.ndarray]:
    """Likewise of the 16 x 8 accumulators, one float32 per register."""
    lane, register = np.meshgrid(np.arange(32), np.arange(4), indexing="ij")
    return lane // 4 + 8 * (register // 2), lane % 4 * 2 + register % 2


def truncate(exact: np.ndarray) -> np.ndarray:
    """float64 to float32, towards zero; values too large become infinite."""
    nearest = exact.astype(np.float32)
    over = np.abs(nearest.astype(np.float64)) > np.abs(exact)
    over &= np.isfinite(nearest)
    return np.where(over, np.nextafter(nearest, np.float32(0)), nearest)


def _fragment(
    arrays: list[np.ndarray], where: tuple[np.ndarray, np.ndarray], shape: tuple[int, int], is_half: bool
) -> Any:
    """A function giving float64 matrices [warps, *shape] from registers."""
    order = np.empty(shape, np.int64)
    lanes, registers = where[0].shape[:2]
    order[where] = np.arange(lanes * registers * 2).reshape(lanes, registers, 2)
    flat = order.reshape(-1)

    def gather() -> np.ndarray:
        halves = np.stack(arrays, axis=1).view(np.uint16).reshape(-1, 32 * registers * 2)
        picked = np.take(halves, flat, axis=1)
        values = picked.view(np.float16) if is_half else widen_bf16(picked)
        return values.astype(np.float64).reshape(-1, *shape)

    return gather


@handles("mma", is_pure=False)
def _mma(instruction: Instruction) -> Plan:
    form = Form(instruction)
    form.one_of("sync")
    form.one_of("aligned")
    k = 16 if form.one_of("m16n8k16", "m16n8k8") == "m16n8k16" else 8
    form.one_of("row")
    form.one_of("col")
    kinds = list(form.left)
    form.left = []
    if kinds not in (["f32", "f16", "f16", "f32"], ["f32", "bf16", "bf16", "f32"]):
        raise instruction.unknown("types")
    d, a, b, c = form.done(4)
    form.registers(d, 4)
    form.registers(a, k // 4)
    form.registers(b, k // 8)
    addends = list(c.items)
    if len(addends) != 4 or not all(isinstance(item, Register | Immediate) for item in addends):
        raise instruction.unknown("accumulators")
    is_half = kinds[1] == "f16"

    def plan(machine: Any) -> Step:
        site = machine.site(instruction)
        left = _fragment([machine.read(item, "b32") for item in a.items], a_places(k), (16, k), is_half)
        right = _fragment([machine.read(item, "b32") for item in b.items], b_places(k), (k, 8), is_half)
        rows, columns = c_places()
        given = [machine.read(item, "f32") for item in addends]
        places = [machine.place(item, "f32") for item in d.items]
        order = np.empty((16, 8), np.int64)
        order[rows, columns] = np.arange(128).reshape(32, 4)
        flat = order.reshape(-1)

        def run(mask: np.ndarray | None) -> None:
            warps = whole_warps(machine, site, mask)
            x, y = left(), right()
            total = np.take(np.stack(given, axis=1).reshape(-1, 128), flat, axis=1).reshape(-1, 16, 8)
            for begin in range(0, k, STEP):
                exact = np.matmul(x[:, :, begin : begin + STEP], y[:, begin : begin + STEP])
                exact += total
                total = truncate(exact)
            np.copyto(total, NAN, where=np.isnan(total))
            result = total[:, rows, columns]
            machine.order_warp_numbers(warps)
            for i, place in enumerate(places):
                if mask is None:
                    place[:] = result[:, :, i].reshape(-1)
                else:
                    np.copyto(place, result[:, :, i].reshape(-1), where=mask)

        return (lambda: run(None)), run

    return plan


def _matrix_form(instruction: Instruction, form: Form) -> tuple[int, bool]:
    form.one_of("sync")
    form.one_of("aligned")
    form.one_of("m8n8")
    count = int(form.one_of("x1", "x2", "x4")[1:])
    is_transposed = form.flag("trans")
    form.one_of("shared", "shared::cta")
    form.type("b16")
    return count, is_transposed


def _halves(is_transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of a lane's two elements of an 8 x 8 matrix."""
    group = np.stack([_GROUP, _GROUP], axis=1)
    pair = np.stack([_PLACE * 2, _PLACE * 2 + 1], axis=1)
    return (pair, group) if is_transposed else (group, pair)


@handles("ldmatrix", is_pure=False)
def _ldmatrix(instruction: Instruction) -> Plan:
    form = Form(instruction)
    count, is_transposed = _matrix_form(instruction, form)
    dst, source = form.done(2)
    registers = form.registers(dst, count)
    address = _check_address(instruction, source, "shared")
    row, column = _halves(is_transposed)

    def plan(machine: Any) -> Step:
        site, where = machine.site(instruction), addresses_of(machine, address)
        places = [machine.place(item, "b32") for item in registers]
        shared = machine.space("shared")

        def run(mask: np.ndarray | None) -> None:
            warps = whole_warps(machine, site, mask)
            lanes = (warps[:, None] * 32 + np.arange(8 * count)).reshape(-1)
            own = where(lanes)
            spots = shared.places(site, lanes, own, 16)
            shared.races.read(site, lanes, shared.races.granules(spots, 16), np.full(len(lanes), MANY, np.int32))
            machine.statistics.matrix_access(site, own, False)
            matrices = shared.view(np.dtype("u2"), 8)[spots // 16].reshape(-1, count, 8, 8)
            picked = np.ascontiguousarray(matrices[:, :, row, column]).view(np.uint32)[..., 0]  # [warp, matrix, lane]
            machine.order_warp_numbers(warps)
            everyone = None if mask is None else (warps[:, None] * 32 + np.arange(32)).reshape(-1)
            for i, place in enumerate(places):
                place[slice(None) if everyone is None else everyone] = picked[:, i].reshape(-1)

        return (lambda: run(None)), run

    return plan


@handles("stmatrix", is_pure=False)
def _stmatrix(instruction: Instruction) -> Plan:
    form = Form(instruction)
    count, is_transposed = _matrix_form(instruction, form)
    target, source = form.done(2)
    registers = form.registers(source, count)
    address = _check_address(instruction, target, "shared")
    row, column = _halves(is_transposed)

    def plan(machine: Any) -> Step:
        site, where = machine.site(instruction), addresses_of(machine, address)
        arrays = [machine.read(item, "b32") for item in registers]
        shared = machine.space("shared")

        def run(mask: np.ndarray | None) -> None:
            warps = whole_warps(machine, site, mask)
            lanes = (warps[:, None] * 32 + np.arange(8 * count)).reshape(-1)
            own = where(lanes)
            spots = shared.places(site, lanes, own, 16)
            shared.races.write(site, lanes, shared.races.granules(spots, 16))
            machine.statistics.matrix_access(site, own, True)
            matrices = np.empty((len(warps), count, 8, 8), np.uint16)
            everyone = (warps[:, None] * 32 + np.arange(32)).reshape(-1)
            for i, array in enumerate(arrays):
                halves = np.ascontiguousarray(array[everyone]).view(np.uint16).reshape(-1, 32, 2)
                matrices[:, i, row, column] = halves
            shared.view(np.dtype("u2"), 8)[spots // 16] = matrices.reshape(-1, 8)
            machine.order_warp_numbers(warps)

        return (lambda: run(None)), run

    return plan
