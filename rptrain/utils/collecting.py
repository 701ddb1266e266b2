"""The garbage collector of Python."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
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


@contextmanager
def gc_rarely() -> Iterator[None]:
    """Search for cycles among new objects only, as long as the context lasts: a search among all of them takes up to
    0.1 s. A program that makes many cycles calls `gc.collect` when it has time. If objects
    were frozen before, all stay frozen.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.freeze()
    gc.set_threshold(20_000, 50, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:  # else those that another context froze would be searched, too
            gc.unfreeze()
