"""Keyed random streams: what a request draws depends on its seed and the output position only,
never on the batch around it."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from specengine.kernels.sample.keyed_uniform import LANE, keyed_uniform


class Stream(IntEnum):
    """What a draw decides. Draws of different streams are independent: a number that chose a draft
    token and also its acceptance would bias the output.

    A position may be drafted and verified in several rounds, until a token is accepted there. Draws
    of DRAFT and ACCEPT are therefore keyed by lane as well, the index of the node in its draft:
    block verification looks at coins and drafts beyond the place where it stops, and if the next
    round met the same numbers again, the output would be biased.
    """

    SAMPLE = 0  # the target's token
    DRAFT = 1  # the drafter's token
    ACCEPT = 2  # whether a drafted token is accepted
    RESIDUAL = 3  # the token in place of a rejected one


def draw(seeds: Tensor, output_pos: Tensor, stream: Stream, lane: Tensor | int = 0) -> Tensor:
    """seeds, output_pos (index of the output token decided), lane (0 .. 2^31 - 1, tells draws about
    the same position apart): int64 [R] -> float64 [R] in [0, 1)."""
    return keyed_uniform(seeds, output_pos + lane * LANE, int(stream))


def choice_seed(seed: int, index: int) -> int:
    """A seed for each of the n choices of a request; the first is the request's own."""
    golden = 0x9E3779B97F4A7C15
    return (seed + index * golden) % (1 << 63) if index else seed
