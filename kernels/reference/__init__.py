"""Every operation in plain PyTorch: the reference of the kernels, and what runs without CUDA."""
