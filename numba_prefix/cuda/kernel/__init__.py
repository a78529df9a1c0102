"""The code of the CUDA kernels: one file for each family, and the rules and PTX that all of them
use."""
