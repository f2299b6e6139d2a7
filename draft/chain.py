"""One round's draft as a chain: a token a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.spec import DraftProposal
from specengine.core.transfer import sent
from specengine.draft.choice import DraftChoice

if TYPE_CHECKING:
    from specengine.draft.worker import DraftWorker


def draft_chain(
    worker: DraftWorker, batch: ScheduleBatch, levels: list[int], choice: DraftChoice
) -> DraftProposal:
    """levels: tokens to draft for each request, the largest at least 1."""
    steps = [worker.plan_level(batch, levels, level) for level in range(1, max(levels))]
    output = worker.start(batch)
    tokens_BN = batch_roots(batch, output.logits.device)
    weights: list[Tensor] = []
    for level in range(max(levels)):
        if level > 0:
            output = worker.run_level(level, steps[level - 1], tokens_BN[:, -1], output.hidden)
        paths_BD = tokens_BN[:, 1:]
        if choice.random is None:
            new_B1 = choice.best(output.logits, paths_BD)[:, None]
        else:
            chosen = choice.children(output.logits, paths_BD, count=1, first_node=level + 1)
            new_B1 = chosen.tokens_RK
            assert chosen.weights_RV is not None
            weights.append(chosen.weights_RV)
        tokens_BN = torch.cat([tokens_BN, new_B1], dim=1)
    return chain_proposal(tokens_BN, [1 + depth for depth in levels], weights)


def chain_proposal(tokens_BN: Tensor, num_nodes: list[int], weights: list[Tensor]) -> DraftProposal:
    """weights: [B, V] of each drafted token, or nothing where none was sampled."""
    batch_size, width = tokens_BN.shape
    parents = torch.arange(-1, width - 1, device=tokens_BN.device).expand(batch_size, -1)
    root = weights[:1]  # in the place of the root's row, which is not read
    probs = torch.stack([*root, *weights], dim=1) if weights else None
    return DraftProposal(tokens_BN, parents, num_nodes, is_chain=True, draft_probs=probs)


def batch_roots(batch: ScheduleBatch, device: torch.device) -> Tensor:
    """int64 [B, 1], the last token of each request."""
    roots = torch.tensor([req.last_token for req in batch.reqs], dtype=torch.int64)
    return sent(roots, device)[:, None]
