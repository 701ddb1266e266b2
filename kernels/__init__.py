"""Fused and reference operations, one subject per file."""

with_triton = True  # set to False before a module is imported: kernels are not compiled, and must not be called
