"""What a run takes on a machine: hardware, the plan that fits, memory, disk, and what to change."""
