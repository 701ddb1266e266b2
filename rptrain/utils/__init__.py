"""Helpers that are independent of training: errors, text, threads, NUMA nodes, native libraries, files, NVML."""
