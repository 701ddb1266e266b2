"""Every operation in plain PyTorch: the oracle of the kernels, and what runs without CUDA."""
