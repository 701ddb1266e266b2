"""The engine that runs a plan: devices, host memory, worker threads and the optimizer."""
