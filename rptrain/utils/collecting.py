"""The garbage collector of Python."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Do not search for cycles as long as the context lasts. Imports and searches make many objects that live on, and
    cycles are rare: the collector would visit all of them again and again.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
