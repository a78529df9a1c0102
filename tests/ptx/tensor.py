"""ldmatrix, stmatrix and mma.sync.

Products are exact and summed exactly (in float64) in steps of 8 along k; after each step the sum is
truncated towards zero to float32. That is how tensor cores have been measured to behave (Fasi et
al. 2021, "Numerical behavior of NVIDIA tensor cores"), on the side of their larger errors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .access import _check_address, addresses_of
from .floats import NAN, widen_bf16
from .forms import Form, Plan, Step, handles
from .operands import Immediate, Register
from .parse import Instruction
from .races import MANY
from .warp import whole_warps

STEP = 8
_CUT = np.uint64(0xFFFFFFFFE0000000)  # float32 has 29 bits less
_GROUP, _PLACE = np.arange(32) // 4, np.arange(32) % 4


@lru_cache
def a_places(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each 16-bit element that lane, register, half of the 16 x k fragment A
    holds."""
    lane, register, half = np.meshgrid(np.arange(32), np.arange(k // 4), np.arange(2), indexing="ij")
    return lane // 4 + 8 * (register % 2), lane % 4 * 2 + half + 8 * (register // 2)


@lru_cache
def b_places(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Likewise of the k x 8 fragment B."""
    lane, register, half = np.meshgrid(np.arange(32), np.arange(k // 8), np.arange(2), indexing="ij")
    return lane % 4 * 2 + half + 8 * register, lane // 4


@lru_cache
def c_places() -> tuple[np.ndarray, np.ndarray]:
    """Likewise of the 16 x 8 accumulators, one float32 per register."""
    lane, register = np.meshgrid(np.arange(32), np.arange(4), indexing="ij")
    return lane // 4 + 8 * (register // 2), lane % 4 * 2 + register % 2


def truncate(exact: np.ndarray) -> None:
    """float64 cut to the precision of float32, in place."""
    bits = exact.view(np.uint64)
    bits &= _CUT


@lru_cache
def _elements(which: str, k: int, num_warps: int) -> np.ndarray:
    """Where registers, one after the other over all lanes, hold the elements of [steps, warps,
    rows, columns]."""
    places, shape = (a_places(k), (16, k)) if which == "a" else (b_places(k), (k, 8))
    lane, register, half = np.indices(places[0].shape)
    order = np.empty((num_warps, *shape), np.int64)
    for warp in range(num_warps):
        order[warp][places] = ((register * num_warps + warp) * 32 + lane) * 2 + half
    steps = np.split(order, k // STEP, axis=2 if which == "a" else 1)
    return np.ascontiguousarray(np.stack(steps))


@lru_cache
def _accumulators(num_warps: int) -> tuple[np.ndarray, np.ndarray]:
    """Where registers hold the elements of [warps, 16, 8], and where those are in it."""
    rows, columns = c_places()
    lane, register = np.indices(rows.shape)
    order = np.empty((num_warps, 16, 8), np.int64)
    for warp in range(num_warps):
        order[warp][rows, columns] = (register * num_warps + warp) * 32 + lane
    back = np.empty(order.size, np.int64)
    back[order.reshape(-1)] = np.arange(order.size)
    return order, back.reshape(4, -1)


def _matrices(arrays: list[np.ndarray], which: str, k: int, is_half: bool) -> Any:
    """A function giving the float64 matrices [steps, warps, rows, columns] that registers hold."""
    elements = _elements(which, k, len(arrays[0]) // 32)

    def gather() -> np.ndarray:
        picked = np.concatenate(arrays).view(np.uint16).take(elements)
        return (picked.view(np.float16) if is_half else widen_bf16(picked)).astype(np.float64)

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
        left = _matrices([machine.read(item, "b32") for item in a.items], "a", k, is_half)
        right = _matrices([machine.read(item, "b32") for item in b.items], "b", k, is_half)
        order, back = _accumulators(machine.num_lanes // 32)
        given = [machine.read(item, "f32") for item in addends]
        places = [machine.place(item, "f32") for item in d.items]

        def run(mask: np.ndarray | None) -> None:
            warps = whole_warps(machine, site, mask, needs_all=True)
            total = np.concatenate(given).take(order).astype(np.float64)
            for products in np.matmul(left(), right()):
                total += products
                truncate(total)
            rounded = total.astype(np.float32)
            if np.count_nonzero(np.isnan(rounded)):
                np.copyto(rounded, NAN, where=np.isnan(rounded))
            result = rounded.take(back)
            machine.order_warp_numbers(warps)
            for i, place in enumerate(places):
                if mask is None:
                    np.copyto(place, result[i])
                else:
                    np.copyto(place, result[i], where=mask)

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
            warps = whole_warps(machine, site, mask, needs_all=True)
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
            warps = whole_warps(machine, site, mask, needs_all=True)
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


@handles("movmatrix", is_pure=False)
def _movmatrix(instruction: Instruction) -> Plan:
    form = Form(instruction)
    for part in ("sync", "aligned", "m8n8", "trans"):
        form.one_of(part)
    form.type("b16")
    dst, source = form.done(2)
    row, column = _halves(False)
    order = np.empty((8, 8), np.int64)
    order[row, column] = np.arange(64).reshape(32, 2)
    picked = order.T[row, column].reshape(-1)

    def plan(machine: Any) -> Step:
        site, array, place = machine.site(instruction), machine.read(source, "b32"), machine.place(dst, "b32")

        def run(mask: np.ndarray | None) -> None:
            warps = whole_warps(machine, site, mask, needs_all=True)
            halves = array.view(np.uint16).reshape(-1, 64)[:, picked]
            result = np.ascontiguousarray(halves).view(np.uint32).reshape(-1)
            machine.order_warp_numbers(warps)
            np.copyto(place, result, where=True if mask is None else mask)

        return (lambda: run(None)), run

    return plan
