"""Which half of the suite runs what of a wide product of parameters: `make test` some of it, in
which each value is met, `make test-all` the whole."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def thinned(step: int, *axes: Iterable[Any]) -> list[ParameterSet]:
    """The product of axes of at least `step` values but for one, of which every step-th diagonal is
    the fast half's: there each value is met, and of three axes, each pair of values. A value that
    is a tuple stands for parameters of its own."""
    found = []
    for numbered in product(*(enumerate(axis) for axis in axes)):
        values = [one if isinstance(one, tuple) else (one,) for _, one in numbered]
        is_slow = sum(number for number, _ in numbered) % step > 0
        marks = [pytest.mark.slow] if is_slow else []
        found.append(pytest.param(*(one for each in values for one in each), marks=marks))
    return found


def slow_but(kept: Iterable[Any], every: Iterable[Any]) -> list[ParameterSet]:
    """All values of a parameter, or of several, of which the fast half runs what is kept."""
    fast = [*kept]
    found = []
    for one in every:
        marks = [] if one in fast else [pytest.mark.slow]
        found.append(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=marks))
    return found
