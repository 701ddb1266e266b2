"""Standard streams that were closed before the process started."""

import os
import sys


def open_missing_streams() -> None:
    """Open /dev/null for every standard stream that is closed.

    A file that is opened later would otherwise become one of them, and Python has None in their place. Child processes
    inherit them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)
            if opened != number:
                os.close(opened)
            else:
                os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))
