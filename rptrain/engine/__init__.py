"""Runs a plan: devices, host memory, workers, the optimizer."""
