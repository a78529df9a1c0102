"""What can be wrong with a program or with how it ran."""

from __future__ import annotations


class UnknownInstruction(Exception):
    """The text holds an opcode, modifier, type or form that is not interpreted. Raised when it is
    parsed."""


class Fault(Exception):
    """What a GPU would have reported, or silently got wrong."""


class LaunchFault(Fault):
    """The launch doesn't fit the kernel: arguments, block size."""


class MemoryFault(Fault):
    """A global, local or constant address outside every buffer, or a store to a read-only one."""


class GlobalRace(Fault):
    """Blocks of one launch exchange data through global memory."""


class Misaligned(Fault):
    """An address that is no multiple of what is accessed there."""


class SharedRace(Fault):
    """Two threads touch the same shared bytes, one of them writing, with no barrier between."""


class SharedBounds(MemoryFault):
    """A shared address outside every declared array."""


class Uninitialized(Fault):
    """Bytes are read that were never written."""


class InFlight(Fault):
    """Bytes are touched that a cp.async has not been waited for, or its source changed, or the
    kernel ended before."""


class Divergence(Fault):
    """An instruction that a whole warp must reach together was reached by a part of it."""


class Deadlock(Fault):
    """Every thread that is left waits, or the program never ends."""
