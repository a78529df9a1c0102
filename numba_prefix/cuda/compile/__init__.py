"""How CUDA kernels are compiled to cubins, and where these are kept."""
