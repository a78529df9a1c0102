"""An interpreter of compiled PTX in NumPy, for tests on machines without a GPU.

    module = Module(ptx_text)
    memory = Memory()
    memory.add("query", array, writable=False)
    arguments = [array.ctypes.data, 1.0]
    options = {"grid": 4, "block": 128, "shared_bytes": 0}
    statistics = module.run(None, arguments=arguments, memory=memory, **options)

It says nothing about time, but it checks what a GPU doesn't: races on shared memory, copies in
flight, bounds, alignment. What it can't tell: races of one block's threads on global memory; last
bits, where ptxas makes fma of a product and a sum or where an approximation is not the nearest
number; whether a target has an instruction (ptxas says so). Calls, bulk copies, mbarriers and wgmma
are not interpreted.
"""

from .faults import (
    Deadlock,
    Divergence,
    Fault,
    GlobalRace,
    InFlight,
    LaunchFault,
    MemoryFault,
    Misaligned,
    SharedBounds,
    SharedRace,
    Uninitialized,
    UnknownInstruction,
)
from .memory import Memory
from .module import Module
from .statistics import Statistics

__all__ = [
    "Deadlock",
    "Divergence",
    "Fault",
    "GlobalRace",
    "InFlight",
    "LaunchFault",
    "Memory",
    "MemoryFault",
    "Misaligned",
    "Module",
    "SharedBounds",
    "SharedRace",
    "Statistics",
    "Uninitialized",
    "UnknownInstruction",
]
