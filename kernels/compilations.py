"""Counts the kernels that had to be compiled, because no cache has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

from specengine.kernels.dispatch import has_triton


@dataclass(eq=False)
class Tally:
    """Kernels compiled while it was open, by whatever thread."""

    kernels: int = 0


_open: list[Tally] = []
_lock = Lock()


def note() -> None:
    """One more was compiled."""
    with _lock:
        for tally in _open:
            tally.kernels += 1


@contextmanager
def tally() -> Iterator[Tally]:
    """What is compiled inside is counted."""
    if has_triton():
        _listen()
    one = Tally()
    with _lock:
        _open.append(one)
    try:
        yield one
    finally:
        with _lock:
            _open.remove(one)


class _Listener:
    """Triton calls it with each kernel that it compiles or finds in its cache. Passes it on."""

    def __init__(self, others: Any) -> None:
        self.others = others

    def __call__(self, *, cache_hit: bool, **compilation: Any) -> None:
        if not cache_hit:
            note()
        if self.others is not None:
            self.others(cache_hit=cache_hit, **compilation)


def _listen() -> None:
    """From now on: two that come and go in any order could not restore what was there before."""
    from triton import knobs

    if not isinstance(knobs.compilation.listener, _Listener):
        knobs.compilation.listener = _Listener(knobs.compilation.listener)
