"""Helpers without knowledge of training: errors, text, threads, native libraries, files, NVML."""
