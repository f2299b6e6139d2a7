"""Keyed random streams: what a request draws depends on its seed and the output position only,
never on the batch around it."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from specengine.kernels.keyed_uniform import keyed_uniform


class Stream(IntEnum):
    """What a draw decides. Draws of different streams are independent: a number that chose a draft
    token and also its acceptance would bias the output."""

    SAMPLE = 0  # the target's token
    DRAFT = 1  # the drafter's token
    ACCEPT = 2  # whether a drafted token stands
    RESIDUAL = 3  # the token in place of a rejected one


def draw(seeds: Tensor, output_pos: Tensor, stream: Stream) -> Tensor:
    """seeds, output_pos (index of the output token decided): int64 [R] -> float64 [R] in [0, 1)."""
    return keyed_uniform(seeds, output_pos, int(stream))
