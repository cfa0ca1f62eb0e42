"""Python's collector of garbage in cycles, while a proof makes many objects of which few lie in cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 50_000  # new objects before the youngest are looked at, not 700: that took a quarter of a proof's time


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, collections are rare, and leave out what exists already: 280,000 objects after the imports."""
    thresholds, outermost = gc.get_threshold(), not gc.get_freeze_count()
    gc.set_threshold(SELDOM, *thresholds[1:])
    if outermost:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if outermost:
            gc.unfreeze()
