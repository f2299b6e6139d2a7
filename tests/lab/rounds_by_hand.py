"""Tables of rounds, written out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specengine.lab.accept.rounds import NodeChunk, RoundChunk, RoundTable, build_table
from specengine.lab.accept.statistics import Sample


@dataclass
class Round:
    """A round of one request: `tokens` are emitted, the bonus token included."""

    request: int
    start: int
    tokens: list[int]
    drafted: int
    goes_on: bool
    context: int = 10
    entropy: list[float] = field(default_factory=list)  # default: 1 throughout
    nodes: list[tuple[float, bool]] = field(default_factory=list)  # confidence, accepted


def chunk(rounds: Sequence[Round]) -> RoundChunk:
    nodes = [(row, *node) for row, one in enumerate(rounds) for node in one.nodes]
    entropy = [value for one in rounds for value in one.entropy or [1.0] * len(one.tokens)]
    return RoundChunk(
        request=np.array([one.request for one in rounds]),
        start=np.array([one.start for one in rounds]),
        context=np.array([one.context for one in rounds]),
        num_drafted=np.array([one.drafted for one in rounds]),
        goes_on=np.array([one.goes_on for one in rounds]),
        lengths=np.array([len(one.tokens) for one in rounds]),
        tokens=np.array([token for one in rounds for token in one.tokens]),
        entropy=np.array(entropy, dtype=np.float32),
        nodes=NodeChunk(
            row=np.array([row for row, _, _ in nodes]),
            confidence=np.array([value for _, value, _ in nodes], dtype=np.float32),
            stood=np.array([stood for _, _, stood in nodes]),
        )
        if nodes
        else None,
    )


def table(*batches: Sequence[Round], final: Sequence[int]) -> RoundTable:
    return build_table([chunk(batch) for batch in batches], np.array(final))


def sample(one: RoundTable, prompts: Sequence[int], num_prompts: int) -> Sample:
    """Two draws: every prompt once, and the first one only. prompts: of each request."""
    drawings = np.ones((2, num_prompts))
    drawings[1] = 0.0
    drawings[1, 0] = num_prompts
    return Sample(one, np.array(prompts)[one.request], drawings)
