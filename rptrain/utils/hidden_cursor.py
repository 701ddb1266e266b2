"""The terminals on which a bar hides the cursor, for a process that ends at once."""

import os
from contextlib import suppress

RESTORED = b"\r\x1b[2K\x1b[?25h"  # erases the line of the bar, and shows the cursor

descriptors = set[int]()  # of these terminals


def restore() -> None:
    """Erase the bars and show the cursor, from a signal handler too: not through what the signal may interrupt."""
    for descriptor in tuple(descriptors):
        with suppress(OSError):
            os.write(descriptor, RESTORED)
