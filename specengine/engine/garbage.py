"""Garbage collections while libraries are imported, and beside an engine that runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """While inside, nothing is collected. What PyTorch makes as it is imported stays, and to look
    through it again and again takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_objects() -> None:
    """Collections pass over what exists by now, for good."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """While inside, collections pass over what exists by now.

    With an engine loaded these are 350,000 objects, most of them PyTorch's. A full collection takes
    a fifth of a second, as long as a hundred rounds of a small model, and comes in between.
    """
    freeze_objects()
    try:
        yield
    finally:
        gc.unfreeze()
