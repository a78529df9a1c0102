"""Compilation of the CPU kernels, and the cache of compiled code."""
