"""Sizes of launches. Triton's own functions of these names cost three microseconds a call on the
host, a tenth of a launch, because kernels may call them too (`constexpr_function`)."""

from __future__ import annotations


def cdiv(count: int, size: int) -> int:
    """Pieces of a size that hold so many."""
    return -(-count // size)


def power_of_2(least: int) -> int:
    """The first power of 2 from `least` on, which is positive."""
    return 1 << (least - 1).bit_length()
