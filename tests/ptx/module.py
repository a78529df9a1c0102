"""A PTX module: parsed and checked whole, then run kernel by kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import arithmetic, bits, compare, convert, fences, tensor  # noqa: F401  # their instructions
from .faults import LaunchFault, UnknownInstruction
from .forms import DTYPES, HANDLERS, Plan
from .machine import Machine
from .memory import Memory, aligned_bytes
from .normal import is_normal, normal_registers
from .operands import Address, Symbol
from .parse import WIDTHS, Kernel, Variable, parse
from .statistics import Statistics

# Threads that run together: more blocks at a time cost less each, until registers no longer fit
# into caches.
LANES = 1024
# Shapes whose bound instructions are kept, of each kernel: registers are large.
_MACHINES = 4
# Bytes of shared memory that a block may use, by target; others are held to the largest.
_SHARED_LIMITS = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_120": 99, "sm_121": 99}


@dataclass
class Options:
    memory: Memory
    grid: tuple[int, int, int]
    is_strict: bool
    may_end_in_flight: bool
    max_steps: int
    statistics: Statistics = field(default_factory=Statistics)


class Program:
    """A kernel, planned; machines for it are kept by shape."""

    def __init__(self, kernel: Kernel, constants: Memory, addresses: dict[str, int], target: str) -> None:
        self.kernel, self.constants, self._addresses, self.target = kernel, constants, addresses, target
        self.plans: list[Plan] = []
        for instruction in kernel.instructions:
            if instruction.head not in HANDLERS:
                raise instruction.unknown("opcode")
            self._check_symbols(instruction)
            self.plans.append(HANDLERS[instruction.head](instruction))
        self._normal = normal_registers(kernel.instructions)
        self.granule = self._granule()
        self.local_bytes, self._locals = self._place("local")
        self._machines: dict[Any, Machine] = {}
        # Binding to one warp finds operands that don't fit their instructions.
        try:
            Machine(self, 1, (32, 1, 1), 0)
        except UnknownInstruction as wrong:
            raise UnknownInstruction(f"{kernel.name}: {wrong}") from None

    def _check_symbols(self, instruction: Any) -> None:
        for operand in instruction.operands:
            symbol = operand.base if isinstance(operand, Address) else operand
            if not isinstance(symbol, Symbol):
                continue
            if instruction.head == "bra":
                known: Any = self.kernel.labels
            elif instruction.opcode.startswith("ld.param"):
                known = self.kernel.parameters
            else:
                known = self.kernel.variables
            if symbol.name not in known:
                raise instruction.unknown(f"symbol {symbol.name}")

    def _granule(self) -> int:
        """The smallest access that shared memory can see."""
        sizes = [16]
        for instruction in self.kernel.instructions:
            parts = instruction.opcode.split(".")
            if parts[0] in ("ld", "st", "atom", "red") and not {"global", "param", "const", "local"} & set(parts):
                vector = next((int(part[1]) for part in parts if part in ("v2", "v4", "v8")), 1)
                sizes.append(WIDTHS[parts[-1]] * vector)
            elif instruction.opcode.startswith("cp.async") and len(instruction.operands) > 2:
                sizes.append(getattr(instruction.operands[2], "value", 4))
        return min(sizes)

    def _place(self, space: str, begin: int = 0) -> tuple[int, dict[str, int]]:
        places: dict[str, int] = {}
        for name, variable in self.kernel.variables.items():
            if variable.space == space and variable.num_bytes:
                places[name] = _unlucky(begin, variable.align)
                begin = places[name] + variable.num_bytes
        return begin, places

    def layout(self, shared_bytes: int) -> tuple[list[tuple[str, int, int]], dict[str, int], int, int]:
        """Shared arrays with their ends, all symbols' addresses, dynamic and static bytes."""
        end, static = self._place("shared")
        variables = self.kernel.variables
        arrays = [(name, begin, begin + variables[name].num_bytes) for name, begin in static.items()]
        dynamic = {name: v for name, v in variables.items() if v.space == "shared" and not v.num_bytes}
        if dynamic and shared_bytes:
            begin = _unlucky(end, max(v.align for v in dynamic.values()))
            arrays += [(name, begin, begin + shared_bytes) for name in dynamic]
        else:
            begin = end
        symbols = {**self._addresses, **self._locals, **static, **dict.fromkeys(dynamic, begin)}
        return arrays, symbols, shared_bytes, sum(variables[name].num_bytes for name in static)

    def is_normal(self, operand: Any) -> bool:
        return is_normal(operand, self._normal)

    def machine(self, num_blocks: int, block: tuple[int, int, int], shared_bytes: int) -> Machine:
        key = num_blocks, block, shared_bytes
        if key not in self._machines:
            if len(self._machines) >= _MACHINES:
                self._machines.pop(next(iter(self._machines)))
            self._machines[key] = Machine(self, num_blocks, block, shared_bytes)
        return self._machines[key]


def _unlucky(begin: int, align: int) -> int:
    """The next address that is a multiple of the alignment, and of nothing more."""
    begin = -(-begin // align) * align
    return begin + align if begin % (2 * align) == 0 else begin


class Module:
    """Parses PTX. Whatever is not interpreted is an UnknownInstruction here, not when it is
    reached."""

    def __init__(self, text: str | bytes) -> None:
        kernels, variables, self.target = parse(text.decode() if isinstance(text, bytes) else text.rstrip("\0"))
        if not kernels:
            raise UnknownInstruction("no kernel")
        self._constants = Memory()
        self._arrays: list[np.ndarray] = []
        addresses = {
            name: self._allocate(name, variable)
            for name, variable in variables.items()
            if variable.space in ("global", "const")
        }
        self._programs = {
            name: Program(kernel, self._constants, addresses, self.target) for name, kernel in kernels.items()
        }

    @property
    def kernels(self) -> list[str]:
        return list(self._programs)

    def _allocate(self, name: str, variable: Variable) -> int:
        array = aligned_bytes(max(variable.num_bytes, 1), max(variable.align, 16))
        array[:] = 0
        if variable.initial is not None:
            dtype = DTYPES[variable.type]
            values = np.array(
                [value & ((1 << 8 * dtype.itemsize) - 1) for value in variable.initial], f"u{dtype.itemsize}"
            )
            array[: values.nbytes] = values.view(np.uint8)
        self._arrays.append(array)
        return self._constants.add(name, array, writable=variable.space == "global")

    def kernel(self, name: str | None = None) -> Kernel:
        return self._program(name).kernel

    def _program(self, name: str | None) -> Program:
        if name is None:
            if len(self._programs) != 1:
                raise LaunchFault(f"which of {', '.join(self._programs)}?")
            return next(iter(self._programs.values()))
        if name not in self._programs:
            raise LaunchFault(f"no kernel {name} among {', '.join(self._programs)}")
        return self._programs[name]

    def run(
        self,
        name: str | None = None,
        *,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        shared_bytes: int = 0,
        arguments: Sequence[Any] = (),
        memory: Memory | None = None,
        is_strict: bool = True,
        may_end_in_flight: bool = False,
        max_steps: int = 500_000,
        lanes: int = LANES,
    ) -> Statistics:
        """Runs a launch and tells what it did. Faults are raised.

        grid, block   numbers of blocks and threads: x, or (x, y, z)
        arguments     integers and floats, in the order of the parameters; bytes for parameters that
                      are arrays
        is_strict     only bar.warp.sync orders shared memory inside a warp; else shuffles, votes,
                      ldmatrix and mma do too, which the PTX manual doesn't promise
        max_steps     basic blocks after which a launch counts as endless
        lanes         threads that run together at most (at least one block's): results don't depend
                      on it
        """
        program = self._program(name)
        grid3, block3 = _three(grid), _three(block)
        self._check(program, grid3, block3, shared_bytes)
        options = Options(memory or Memory(), grid3, is_strict, may_end_in_flight, max_steps)
        options.memory.begin()
        total = grid3[0] * grid3[1] * grid3[2]
        threads = -(-block3[0] * block3[1] * block3[2] // 32) * 32
        together = max(1, min(total, lanes // threads))
        machine = program.machine(together, block3, shared_bytes)
        _bind_arguments(program.kernel, machine.parameter_bytes, arguments)
        for block_runs in machine.blocks:
            block_runs.runs = 0
        for first in range(0, total, together):
            machine.run(first, min(together, total - first), options)
        _count(machine, options.statistics)
        return options.statistics

    def _check(self, program: Program, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int) -> None:
        threads, limit = block[0] * block[1] * block[2], program.kernel.max_threads or 1024
        if not 0 < threads <= min(limit, 1024):
            raise LaunchFault(f"{program.kernel.name}: {threads} threads in a block, at most {limit}")
        if min(grid) < 1 or max(grid[1:]) > 65535 or grid[0] >= 2**31:
            raise LaunchFault(f"{program.kernel.name}: grid {grid}")
        static = program.layout(shared_bytes)[3]
        most = 1024 * _SHARED_LIMITS.get(self.target.rstrip("af"), 227)
        if static > 48 * 1024 or static + shared_bytes > most:
            raise LaunchFault(
                f"{program.kernel.name}: {static} + {shared_bytes} bytes of shared memory, at most {most}"
            )


def _three(size: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int | np.integer) else tuple(size)
    x, y, z = (*(int(each) for each in sizes), 1, 1, 1)[:3]
    return x, y, z


def _bind_arguments(kernel: Kernel, place: np.ndarray, arguments: Sequence[Any]) -> None:
    if len(arguments) != len(kernel.parameters):
        raise LaunchFault(f"{kernel.name}: {len(arguments)} arguments for {len(kernel.parameters)} parameters")
    for value, (name, (offset, kind)) in zip(arguments, kernel.parameters.items(), strict=True):
        if isinstance(value, bytes):
            data = np.frombuffer(value, np.uint8)
        elif isinstance(value, float | np.floating):
            dtype = {"f64": "f8", "b64": "f8", "f32": "f4", "b32": "f4"}.get(kind)
            if dtype is None:
                raise LaunchFault(f"{kernel.name}: a float for parameter {name} of type .{kind}")
            data = np.array([value], dtype).view(np.uint8)
        else:
            if kind in ("f32", "f64"):
                raise LaunchFault(f"{kernel.name}: an integer for parameter {name} of type .{kind}")
            size = WIDTHS[kind]
            if not -(1 << (8 * size - 1)) <= int(value) < 1 << 8 * size:
                raise LaunchFault(f"{kernel.name}: {value} doesn't fit parameter {name} of type .{kind}")
            data = np.frombuffer((int(value) % (1 << 8 * size)).to_bytes(size, "little"), np.uint8)
        place[offset : offset + len(data)] = data


def _count(machine: Machine, statistics: Statistics) -> None:
    by_opcode: Counter[str] = Counter()
    for block in machine.blocks:
        for instruction in block.instructions:
            by_opcode[instruction.opcode] += block.runs
            statistics.lines[instruction.line] += block.runs
    statistics.instructions.update(+by_opcode)
