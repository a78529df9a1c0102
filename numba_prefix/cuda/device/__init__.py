"""The GPU through the driver: contexts, memory, streams, arrays."""
