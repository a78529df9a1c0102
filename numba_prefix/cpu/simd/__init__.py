"""Vectors, tiles and memory accesses as Numba intrinsics: what Numba has no words for."""
