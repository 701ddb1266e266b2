"""The console on which commands print."""

import os
import sys

from rich.console import Console

from rptrain.utils.text import is_terminal

ENDLESS = 100_000  # columns: no line is that long


def output() -> Console:
    """Standard output. Lines are wrapped and cells of tables cut to the width of a terminal, or to that of the
    variable COLUMNS; a pipe or a file gets them whole.
    """
    whole = not is_terminal(sys.stdout) and "COLUMNS" not in os.environ
    return Console(highlight=False, width=ENDLESS if whole else None)
