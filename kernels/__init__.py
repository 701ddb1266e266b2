"""Fused and reference operations, one subject per file."""
