"""Planning a run for a machine: hardware, plan, memory, disk, and advice."""
