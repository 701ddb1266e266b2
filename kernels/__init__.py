"""Fused and reference operations, one subject a file."""
