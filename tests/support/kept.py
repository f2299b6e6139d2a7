"""What a module's tests share, where one of them ends it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """One of what `make` gives, made anew once it was ended: a worker may run the tests of a module
    in any order."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._made: tuple[AbstractContextManager[T], T] | None = None

    def get(self) -> T:
        if self._made is None:
            context = self._make()
            self._made = context, context.__enter__()
        return self._made[1]

    def end(self) -> None:
        if self._made is not None:
            context, self._made = self._made[0], None
            context.__exit__(None, None, None)
