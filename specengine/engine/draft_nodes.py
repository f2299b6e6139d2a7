"""Parts of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specengine.core.spec import DraftProposal, VerifyResult
from specengine.core.transfer import sent


@dataclass(frozen=True)
class HostTree:
    """The draft of one request on the host. All [number of nodes]; parents before children."""

    tokens: list[int]
    parents: list[int]

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def depths_of(self, is_kept: Sequence[bool]) -> list[int]:
        """Depths of the drafts that are kept, in order, without the root; its children have 1."""
        depths = [0]
        for node, parent in enumerate(self.parents[1:], start=1):
            # A node that is its own parent is padding.
            depths.append(1 + depths[parent] if parent < node else 0)
        return [depth for depth, kept in zip(depths[1:], is_kept[1:], strict=True) if kept]

    def part(self, kept: list[int]) -> HostTree:
        """The tree of these nodes, root first; with each of them, its parent."""
        return HostTree([self.tokens[node] for node in kept], _renumbered(self.parents, kept))


def keep_nodes(
    proposal: DraftProposal, kept: list[list[int]], parents: list[list[int]]
) -> DraftProposal:
    """The proposal with these nodes of each request only, moved to the front of its row.

    kept: ascending, the root first; with each node, its parent. parents: the proposal's, on the
    host.
    """
    num_nodes = [len(nodes) for nodes in kept]
    if num_nodes == proposal.num_nodes:
        return proposal
    width, device = proposal.tokens.shape[1], proposal.tokens.device
    pairs = zip(parents, kept, strict=True)
    index_BN = _padded(kept, width)
    parents_BN = _padded([_renumbered(row, nodes) for row, nodes in pairs], width)
    packed = sent(torch.stack([index_BN, parents_BN]), device)
    rows = torch.arange(len(kept), device=device)[:, None]

    def take(x: torch.Tensor | None) -> torch.Tensor | None:
        return x if x is None else x[rows, packed[0]]

    return replace(
        proposal,
        tokens=proposal.tokens[rows, packed[0]],
        parents=packed[1],
        num_nodes=num_nodes,
        draft_probs=take(proposal.draft_probs),
        confidence=take(proposal.confidence),
        ranks=None if proposal.ranks is None else _parts(proposal.ranks, kept),
    )


def best_nodes(proposal: DraftProposal, most: int) -> DraftProposal:
    """The proposal with no more than the `most` best nodes of each request, root included; as it is
    where the proposal has no ranks."""
    if proposal.ranks is None or max(proposal.num_nodes) <= most:
        return proposal
    confidence = proposal.confidence
    return replace(
        proposal,
        tokens=proposal.tokens[:, :most].contiguous(),
        parents=proposal.parents[:, :most].contiguous(),
        num_nodes=[min(count, most) for count in proposal.num_nodes],
        confidence=None if confidence is None else confidence[:, :most].contiguous(),
        ranks=[row[:most] for row in proposal.ranks],
    )


def path_ranks(proposal: DraftProposal, result: VerifyResult) -> list[list[int]] | None:
    """Ranks of the accepted drafts, without the root; None where the proposal has no ranks."""
    if proposal.ranks is None:
        return None
    chains = [list(range(1 + count)) for count in result.num_accepted]
    pairs = zip(proposal.ranks, result.kv_keep or chains, strict=True)
    return [[ranks[node] for node in path[1:]] for ranks, path in pairs]


def _parts(rows: Sequence[Sequence[int]], kept: list[list[int]]) -> list[list[int]]:
    return [[row[node] for node in nodes] for row, nodes in zip(rows, kept, strict=True)]


def _renumbered(parents: list[int], kept: list[int]) -> list[int]:
    place = {node: i for i, node in enumerate(kept)}
    return [-1, *(place[parents[node]] for node in kept[1:])]


def _padded(rows: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])
