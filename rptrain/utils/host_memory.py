"""Host memory that this process may use."""

import psutil

from rptrain.utils import control_groups


def available_bytes() -> int:
    """Host memory that this process may still allocate: free memory, or the least that a control group has left."""
    return min([psutil.virtual_memory().available, *control_groups.memory_left()])
