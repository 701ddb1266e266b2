"""Settings of torch's allocator of GPU memory."""

import os


def keep_allocator_tidy() -> None:
    """Set before torch is imported: slots are large and live long, and memory between them would be lost."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
