"""From the target's token at every node to the accepted path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.spec import DraftProposal
from specengine.kernels.accept.types import Accepted


@dataclass(frozen=True)
class Walk:
    """The accepted path of one request, root first, and the token sampled at each node of it."""

    nodes: list[int]
    tokens: list[int]


def walk(tokens: list[int], parents: list[int], sampled: list[int]) -> Walk:
    """From the root to the child that carries the token sampled at its parent, while there is one.

    All [num_nodes]. A child comes after its parent, so that one pass over the nodes is enough.
    """
    nodes, wanted = [0], sampled[0]
    for node in range(1, len(sampled)):
        if tokens[node] == wanted and parents[node] == nodes[-1]:
            nodes.append(node)
            wanted = sampled[node]
    return Walk(nodes, [sampled[node] for node in nodes])


def walk_all(proposal: DraftProposal, sampled: list[int]) -> list[Walk]:
    """sampled: [T], a token a node that exists. On the host: a pass costs a microsecond or two a
    request, less than the launches of a vectorised walk."""
    tokens, parents = proposal.tokens.tolist(), proposal.parents.tolist()
    walks, start = [], 0
    for i, count in enumerate(proposal.num_nodes):
        walks.append(walk(tokens[i], parents[i], sampled[start : start + count]))
        start += count
    return walks


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root, which is 0, down to `node`."""
    path = [node]
    while path[-1] > 0:
        path.append(parents[path[-1]])
    return path[::-1]


def to_host(found: Accepted, tokens_BN: Tensor, parents_BN: Tensor) -> list[Walk]:
    """What a kernel decided about these drafts, in one copy."""
    columns = [found.ends_B[:, None], found.tokens_B[:, None], tokens_BN, parents_BN]
    walks, width = [], tokens_BN.shape[1]
    for end, last, *nodes in torch.cat(columns, dim=1).tolist():
        path = path_to(end, parents=nodes[width:])
        walks.append(Walk(path, [*(nodes[node] for node in path[1:]), last]))
    return walks
