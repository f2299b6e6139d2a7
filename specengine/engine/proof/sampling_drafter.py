"""A drafter that samples without a model, so that any engine can be held against sampled drafts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.drafter import Drafter
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.engine.proof.shapes import Shape, draw_tree


class SamplingDrafter(Drafter):
    """Draws trees of one shape from random distributions over a few tokens, one for each pair of
    tokens that went before.

    node_limit(req): the most nodes, root included, that a request can use in this round.
    """

    emits_probs = True

    def __init__(
        self,
        shape: Shape,
        tokens: list[int],
        vocab_size: int,
        node_limit: Callable[[Req], int],
    ) -> None:
        self.shape = shape
        self.proposes_tree = not shape.is_chain
        self.max_nodes = shape.num_nodes
        self._tokens = torch.tensor(tokens)
        self._vocab_size = vocab_size
        self._node_limit = node_limit
        count = len(tokens)
        generator = torch.Generator().manual_seed(0)
        # Twice: what follows one pair of tokens tells little of what follows another.
        self._table = (2 * torch.randn(count, count, count, generator=generator)).softmax(-1)

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        """Tensors are on the CPU."""
        drawn = draw_tree(
            self.shape,
            torch.tensor([req.token_ids[-2:] for req in batch.reqs]),
            self._rows,
            torch.tensor([req.seed for req in batch.reqs]),
            torch.tensor([len(req.output_ids) for req in batch.reqs]),
        )
        limits = [max(1, self._node_limit(req)) for req in batch.reqs]
        return DraftProposal(
            tokens=drawn.tokens_BN,
            parents=torch.tensor([[-1, *self.shape.parents]]).expand_as(drawn.tokens_BN),
            num_nodes=[min(self.shape.num_nodes, limit) for limit in limits],
            is_chain=self.shape.is_chain,
            draft_probs=drawn.probs_BNV,
        )

    def _rows(self, pairs_B2: Tensor) -> Tensor:
        """float32 [B, V]. Tokens that are none of the few count as the first of them."""
        ranks_B2 = (pairs_B2[:, :, None] == self._tokens).long().argmax(-1)
        rows_BV = torch.zeros(len(pairs_B2), self._vocab_size)
        rows_BV[:, self._tokens] = self._table[ranks_B2[:, 0], ranks_B2[:, 1]]
        return rows_BV
