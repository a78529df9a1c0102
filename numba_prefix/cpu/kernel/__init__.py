"""The code of the CPU kernels: one tile loop for each phase (prefill, decode) and one micro-kernel
for each instruction set."""
