"""Lossy: accepts as many drafts as configured, so that speed can be measured without a drafter
that is any good."""

from __future__ import annotations

import random

from specengine.core.interfaces import LogitsOutput
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.target.verify.match import MatchVerifier
from specengine.target.verify.rows import row_map
from specengine.target.verify.walk import Walk


class SimulatedVerifier(MatchVerifier):
    """Accepts first children, so many that rounds emit `length` tokens on average, bonus included,
    as far as drafts reach. The target's tokens are sampled all the same."""

    is_lossy = True
    device_rule = "match"  # with an accepted length to force
    keeps_logits = False

    def __init__(self, length: float) -> None:
        super().__init__()
        self.whole, self.part = divmod(length - 1.0, 1.0)
        self.random = random.Random(0)

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        if proposal.is_empty:
            return super().walks(output, sampling, proposal)
        sampled = self.sampler(output, sampling, row_map(proposal, sampling)).tolist()
        parents, walks, start = proposal.parents.tolist(), [], 0
        for row, count in zip(parents, proposal.num_nodes, strict=True):
            most = int(self.whole) + (self.random.random() < self.part)
            nodes = first_children(row[:count], most)
            walks.append(Walk(nodes, [sampled[start + node] for node in nodes]))
            start += count
        return walks


def first_children(parents: list[int], most: int) -> list[int]:
    """The root, and at most so many nodes below it, each the first child of the one before."""
    nodes = [0]
    for node, parent in enumerate(parents):
        if parent == nodes[-1] and node > 0 and len(nodes) <= most:
            nodes.append(node)
    return nodes
