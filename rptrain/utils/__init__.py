"""Helpers that are independent of training: errors, text, threads, native libraries, files, NVML."""
