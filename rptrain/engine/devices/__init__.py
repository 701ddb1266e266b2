"""Devices: five ordered streams and memory, on a GPU or on the CPU."""
