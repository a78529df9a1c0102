"""Compiles CUDA kernels to cubins and keeps these on disk."""
