"""Which half of the suite runs what of a wide product of parameters: `make test` some of it, in
which each value is met, `make test-all` the whole."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def thinned(step: int, *axes: Iterable[Any]) -> list[Any]:
    """The product of axes, of which every step-th diagonal is the fast half's: each value is met
    there, and each pair of values where a third axis has as many as `step`. A value that is a tuple
    stands for parameters of its own."""
    lists = [[*axis] for axis in axes]
    assert sum(len(one) >= step for one in lists) > 1, "some values would never be met"
    found = []
    for numbered in product(*(enumerate(one) for one in lists)):
        values = [one if isinstance(one, tuple) else (one,) for _, one in numbered]
        is_slow = sum(number for number, _ in numbered) % step > 0
        marks = [pytest.mark.slow] if is_slow else []
        found.append(pytest.param(*(one for each in values for one in each), marks=marks))
    return found


def each_value(walks: int, *axes: Iterable[Any]) -> list[Any]:
    """The product of axes, of which the fast half runs some walks. In a walk each value of the
    longest axis meets one value of each other axis, all of which are met; in the next walk it meets
    others. A value that is a tuple stands for parameters of its own."""
    lists = [[*axis] for axis in axes]
    longest = max(map(len, lists))
    fast = {
        tuple((number + walk * place) % len(one) for place, one in enumerate(lists))
        for walk in range(walks)
        for number in range(longest)
    }
    found = []
    for numbers in product(*(range(len(one)) for one in lists)):
        values = [one[number] for one, number in zip(lists, numbers, strict=True)]
        flat = [one for each in values for one in (each if isinstance(each, tuple) else (each,))]
        found.append(pytest.param(*flat, marks=[] if numbers in fast else [pytest.mark.slow]))
    return found


def slow_but(kept: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """All values of a parameter, or of several as tuples, of which the fast half runs what is
    kept."""
    fast, found = [*kept], []
    for one in every:
        marks = [] if one in fast else [pytest.mark.slow]
        found.append(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=marks))
        fast = [other for other in fast if other != one]
    assert not fast, "what is kept is none of them"
    return found
