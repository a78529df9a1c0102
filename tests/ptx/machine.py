"""Runs one kernel's blocks, several at a time: registers are arrays over all of their threads.

The lowest program counter among the threads that can run goes first, under a mask, so that branches
which part meet again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .access import WINDOWS
from .barriers import Barriers
from .blocks import BasicBlock, split
from .copies import Copies
from .faults import Deadlock, Fault, UnknownInstruction
from .forms import DTYPES
from .memory import Memory
from .operands import Immediate, Register, Sink, Special, Symbol
from .order import ranks
from .parse import WIDTHS, Instruction, Kernel
from .shared import LocalSpace, SharedSpace
from .space import GlobalSpace
from .statistics import Statistics


class Site:
    """An instruction as faults name it."""

    __slots__ = ("instruction", "line", "machine")

    def __init__(self, machine: Machine, instruction: Instruction) -> None:
        self.machine, self.instruction, self.line = machine, instruction, instruction.line

    def fault(self, kind: type[Fault], lanes: Any, place: int, what: str) -> Fault:
        """place: a position among the lanes (None: all)."""
        machine = self.machine
        lane = place if lanes is None else int(lanes[place])
        block = machine.first_block + lane // machine.lanes_per_block
        thread = int(machine.thread[lane])
        return kind(
            f"{machine.kernel.name}, PTX line {self.line}, block {block}, thread {thread}: {what}\n  {self.instruction.text}"
        )


class Machine:
    def __init__(self, program: Any, num_blocks: int, block: tuple[int, int, int], shared_bytes: int) -> None:
        self.program, self.kernel = program, program.kernel
        kernel: Kernel = program.kernel
        self.block, self.grid = block, (1, 1, 1)
        self.num_threads = block[0] * block[1] * block[2]
        self.warps_per_block = -(-self.num_threads // 32)
        self.lanes_per_block = 32 * self.warps_per_block
        self.num_blocks = self.num_live_blocks = num_blocks
        self.num_lanes = num_blocks * self.lanes_per_block
        lane = np.arange(self.num_lanes)
        self.thread = (lane % self.lanes_per_block).astype(np.int32)
        self.warp = lane // 32
        self.all_warps = np.arange(self.num_lanes // 32)
        self.exists = self.thread < self.num_threads
        self.everyone = self.alive = self.exists
        self.num_alive = 0
        self.first_block = 0
        self.statistics = Statistics()
        self.windows = WINDOWS
        self.is_strict = False
        self.parameter_bytes = np.zeros(-(-kernel.parameter_bytes // 16) * 16, np.uint8)
        arrays, self._symbols, self.dynamic_bytes, self.static_bytes = program.layout(shared_bytes)
        self.shared = SharedSpace(self, arrays, program.granule)
        self._spaces = {
            "shared": self.shared,
            "local": LocalSpace(self, program.local_bytes),
            "global": GlobalSpace(self, Memory(), program.constants),
        }
        self.copies = Copies(self)
        self._registers: dict[str, np.ndarray] = {}
        self._constants: dict[Any, np.ndarray] = {}
        self._scratch: dict[Any, np.ndarray] = {}
        self._grid_arrays: list[tuple[str, np.ndarray]] = []
        self._specials = self._special_registers()
        self.blocks: list[BasicBlock] = split(self)
        self._rank = [*ranks([block.successors(len(self.blocks)) for block in self.blocks]), len(self.blocks)]

    # What instructions ask for when they are bound.

    def register(self, register: Register) -> np.ndarray:
        if register.name not in self._registers:
            if register.type == "pred":
                array = np.ones(self.num_lanes, bool)
            else:
                array = np.full(self.num_lanes, -1, np.dtype(f"i{WIDTHS[register.type]}"))
            self._registers[register.name] = array
        return self._registers[register.name]

    def read(self, operand: Any, kind: str) -> np.ndarray:
        """The array that holds an operand's values of that type: not to be written."""
        dtype = DTYPES[kind]
        if isinstance(operand, Register):
            array = self.register(operand)
            if (operand.type == "pred") != (kind == "pred") or array.itemsize < dtype.itemsize:
                raise UnknownInstruction(f"{operand.name} as .{kind}")
            ratio = array.itemsize // dtype.itemsize
            return array.view(dtype) if ratio == 1 else array.view(dtype)[::ratio]
        if isinstance(operand, Special):
            array = self._specials[operand.name].astype(dtype)
            if "cta" in operand.name:
                self._grid_arrays.append((operand.name, array))
            return array
        if isinstance(operand, Symbol):
            return self._constant(self.symbol(operand), dtype)
        if isinstance(operand, Immediate):
            return self._immediate(operand, kind)
        raise UnknownInstruction(f"operand {operand} as .{kind}")

    def _immediate(self, operand: Immediate, kind: str) -> np.ndarray:
        dtype = DTYPES[kind]
        if kind == "pred":
            return self._constant(bool(operand.value), dtype)
        bits = operand.value & ((1 << (8 * dtype.itemsize)) - 1)
        if operand.float_bytes == 8 and kind == "f32":
            value = np.array(operand.value, np.uint64).view(np.float64).astype(np.float32)
            bits = int(value.view(np.uint32))
        elif (operand.float_bytes and operand.float_bytes != dtype.itemsize) or (
            dtype.kind == "f" and not operand.float_bytes
        ):
            raise UnknownInstruction(f"immediate {operand} as .{kind}")
        return self._constant(np.array(bits, f"u{dtype.itemsize}").view(dtype)[()], dtype)

    def _constant(self, value: Any, dtype: np.dtype) -> np.ndarray:
        key = dtype.str, np.array(value).astype(dtype).tobytes()
        if key not in self._constants:
            self._constants[key] = np.full(self.num_lanes, np.array(value).astype(dtype))
            self._constants[key].flags.writeable = False
        return self._constants[key]

    def place(self, operand: Any, kind: str) -> np.ndarray:
        """Where a result of that type is written; of the register's width, so that integers are
        extended."""
        if isinstance(operand, Sink):
            return self.scratch(kind, "sink")
        if not isinstance(operand, Register) or (operand.type == "pred") != (kind == "pred"):
            raise UnknownInstruction(f"destination {operand} as .{kind}")
        array, dtype = self.register(operand), DTYPES[kind]
        if array.itemsize == dtype.itemsize:
            return array.view(dtype)
        if array.itemsize < dtype.itemsize or dtype.kind == "f":
            raise UnknownInstruction(f"{operand.name} as .{kind}")
        return array.view(f"{dtype.kind}{array.itemsize}")

    def scratch(self, kind: str, role: str = "", size: int = 0) -> np.ndarray:
        """An array that is free until the next instruction; one of each role, however often it is
        asked for."""
        if (kind, role) not in self._scratch:
            self._scratch[kind, role] = np.empty(size or self.num_lanes, DTYPES[kind])
        return self._scratch[kind, role]

    def flag(self, name: str) -> np.ndarray:
        """A hidden predicate register."""
        return self.register(Register(f"flag {name}", "pred"))

    def symbol(self, symbol: Symbol) -> int:
        if symbol.name not in self._symbols:
            raise UnknownInstruction(f"symbol {symbol.name}")
        return self._symbols[symbol.name] + symbol.offset

    def parameter(self, name: str) -> int:
        if name not in self.kernel.parameters:
            raise UnknownInstruction(f"parameter {name}")
        return self.kernel.parameters[name][0]

    def space(self, name: str) -> Any:
        return self._spaces[name]

    def site(self, instruction: Instruction) -> Site:
        return Site(self, instruction)

    def is_normal(self, operand: Any) -> bool:
        return self.program.is_normal(operand)

    def block_of(self, lanes: Any) -> np.ndarray:
        """Numbers of blocks in the grid."""
        every = np.arange(self.num_lanes) if lanes is None else lanes
        return (every // self.lanes_per_block + self.first_block).astype(np.int32)

    def _special_registers(self) -> dict[str, np.ndarray]:
        thread, lane = self.thread.astype(np.uint32), np.arange(self.num_lanes, dtype=np.uint32) % 32
        x, y = self.block[0], self.block[1]
        one, full = np.ones(self.num_lanes, np.uint32), np.uint64(0xFFFFFFFF)
        bit = np.uint64(1) << lane.astype(np.uint64)
        values: dict[str, Any] = {
            **{"tid.x": thread % x, "tid.y": thread // x % y, "tid.z": thread // (x * y)},
            **{f"ntid.{axis}": one * np.uint32(size) for axis, size in zip("xyz", self.block, strict=True)},
            **{f"{name}.{axis}": one for name in ("ctaid", "nctaid") for axis in "xyz"},  # set when run
            **{"laneid": lane, "warpid": thread // 32, "nwarpid": one * np.uint32(self.warps_per_block)},
            **{"lanemask_eq": bit, "lanemask_lt": bit - 1, "lanemask_le": 2 * bit - 1},
            **{"lanemask_gt": full & ~(2 * bit - 1), "lanemask_ge": full & ~(bit - 1)},
            "dynamic_smem_size": one * np.uint32(self.dynamic_bytes),
            "total_smem_size": one * np.uint32(self.dynamic_bytes + self.static_bytes),
        }
        return {name: value.astype(np.uint32) for name, value in values.items()}

    # Running.

    def run(self, first_block: int, num_live: int, options: Any) -> None:
        self._begin(first_block, num_live, options)
        waiting: dict[int, np.ndarray] = {0: self.alive.copy()}
        barriers = Barriers(self)
        steps = 0
        with np.errstate(all="ignore"):
            while True:
                if not waiting:
                    if barriers.is_empty:
                        break
                    raise barriers.deadlock()
                number = min(waiting, key=self._rank.__getitem__)
                mask = waiting.pop(number)
                if number == len(self.blocks):  # the text just ends
                    self.exit(mask)
                    barriers.release(waiting)
                    continue
                block = self.blocks[number]
                block.execute(self, mask)
                block.leave(self, mask, waiting, barriers)
                steps += 1
                if steps > options.max_steps:
                    site = Site(self, block.last)
                    raise site.fault(Deadlock, np.flatnonzero(mask), 0, f"still running after {steps} basic blocks")
        if not options.may_end_in_flight:
            self.copies.finish()

    def _begin(self, first_block: int, num_live: int, options: Any) -> None:
        self.first_block, self.num_live_blocks = first_block, num_live
        self.is_strict, self.statistics = options.is_strict, options.statistics
        self.everyone = self.exists & (np.arange(self.num_lanes) < num_live * self.lanes_per_block)
        self.alive = self.everyone.copy()
        self.num_alive = int(np.count_nonzero(self.alive))
        for register in self._registers.values():
            register[:] = -1
        numbers = (first_block + np.arange(self.num_lanes) // self.lanes_per_block).astype(np.uint32)
        self.grid = options.grid
        x, y, _ = self.grid
        values: dict[str, Any] = {"ctaid.x": numbers % x, "ctaid.y": numbers // x % y, "ctaid.z": numbers // (x * y)}
        values |= {f"nctaid.{axis}": size for axis, size in zip("xyz", self.grid, strict=True)}
        for name, array in self._grid_arrays:
            array[:] = values[name]
        self.shared.reset()
        self.copies = Copies(self)
        self._spaces["global"].memory = options.memory

    def exit(self, mask: np.ndarray) -> None:
        self.alive &= ~mask
        self.num_alive = int(np.count_nonzero(self.alive))

    def order_warps(self, here: np.ndarray, is_barrier: bool = False) -> None:
        """Orders the lanes of warps all of whose remaining lanes are here."""
        if self.shared.stride and (is_barrier or not self.is_strict):
            whole = (here == self.alive.reshape(-1, 32)).all(axis=1) & here.any(axis=1)
            self.shared.races.order_warps(np.flatnonzero(whole))

    def order_warp_numbers(self, warps: np.ndarray) -> None:
        if self.shared.stride and not self.is_strict:
            self.shared.races.order_warps(warps)
