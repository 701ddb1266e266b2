"""A device is five ordered streams and memory: the CPU's and the GPU's."""
