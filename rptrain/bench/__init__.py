"""Benchmarks of training on this machine, and its roofline time."""
