"""One round's draft as a tree: topk nodes of each level are expanded, topk children each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.spec import DraftProposal
from specengine.core.transfer import sent
from specengine.core.tree import Tree
from specengine.draft.chain import batch_roots
from specengine.draft.choice import DraftChoice
from specengine.draft.tree_select import Candidates, Selection, best, select

if TYPE_CHECKING:
    from specengine.draft.worker import DraftWorker


def draft_tree(
    worker: DraftWorker, batch: ScheduleBatch, levels: list[int], choice: DraftChoice
) -> DraftProposal:
    """levels: how deep each request drafts, the largest at least 1."""
    steps = []
    for level in range(1, max(levels)):
        tree = _blank_tree(batch.batch_size, worker.topk, level, worker.runner.device)
        steps.append(worker.plan_level(batch, levels, level, tree))
    output = worker.start(batch)
    growth = Growth(batch_roots(batch, worker.runner.device), levels, worker.topk, choice)
    growth.branch(output.logits)
    for level, step in enumerate(steps, start=1):
        assert step.tree is not None
        growth.descend(output.hidden)
        growth.show_ancestors(step.tree.mask_BNN)
        output = worker.run_level(level, step, growth.tokens_T, growth.states_TH)
        growth.branch(output.logits)
    return growth.proposal([worker.nodes(req) for req in batch.reqs])


class Growth:
    """A batch of trees on the way down: all candidates found, and the P nodes of each request whose
    children are looked for now; first the root alone, then topk of each level."""

    def __init__(self, roots_B1: Tensor, levels: list[int], topk: int, choice: DraftChoice) -> None:
        self.roots_B1 = roots_B1
        self.topk = topk
        self.choice = choice
        self.levels = levels
        self.levels_B1 = sent(torch.tensor(levels), roots_B1.device)[:, None]
        self.depth = 0
        none_B0 = roots_B1[:, :0]
        self.found = Candidates(none_B0, none_B0.float(), none_B0, none_B0.bool())
        self.weights: list[Tensor] = []  # [B, P, V] of each level, where drafts are sampled
        # of the nodes to expand
        self.paths_BPD = none_B0[:, None]  # tokens from the root's child down to the node
        self.scores_BP = torch.zeros_like(roots_B1, dtype=torch.float32)
        self.candidates_BP = torch.full_like(roots_B1, -1)
        self.exists_BP = torch.ones_like(roots_B1, dtype=torch.bool)
        self.states_BPH: Tensor | None = None  # what their rows continue
        self.seen_BPN = none_B0[:, None].bool()  # which nodes of earlier levels they see

    @property
    def tokens_T(self) -> Tensor:
        return self.paths_BPD[:, :, -1].flatten()

    @property
    def states_TH(self) -> Tensor | None:
        return None if self.states_BPH is None else self.states_BPH.flatten(0, 1)

    def branch(self, logits_TV: Tensor) -> None:
        """Find the children of the nodes that these logits follow."""
        batch_size, rows = self.scores_BP.shape
        first = 1 + self.found.tokens_BC.shape[1]
        chosen = self.choice.children(logits_TV, self.paths_BPD.flatten(0, 1), self.topk, first)
        scores_BPK = self.scores_BP[:, :, None] + chosen.scores_RK.view(batch_size, rows, -1)
        goes_on_B1 = self.levels_B1 > self.depth
        exists_BC = self.exists_BP.repeat_interleave(self.topk, dim=1)
        if chosen.exists_RK is not None:
            exists_BC = exists_BC & chosen.exists_RK.view(batch_size, -1)
        self.new = Candidates(
            tokens_BC=chosen.tokens_RK.view(batch_size, -1),
            scores_BC=scores_BPK.flatten(1).where(goes_on_B1, float("-inf")),
            parents_BC=self.candidates_BP.repeat_interleave(self.topk, dim=1),
            exists_BC=exists_BC,
        )
        self.found = self.found.joined(self.new)
        if chosen.weights_RV is not None:
            self.weights.append(chosen.weights_RV.view(batch_size, rows, -1))
        self.depth += 1

    def descend(self, states_TH: Tensor | None) -> None:
        """Go on with the best of the children just found. states: of the nodes above them."""
        batch_size, rows = self.scores_BP.shape
        picked_BP = best(self.new.scores_BC, self.topk)
        above_BP = picked_BP // self.topk
        tokens_BP = self.new.tokens_BC.gather(1, picked_BP)
        paths_BPD = _rows(self.paths_BPD, above_BP)
        self.paths_BPD = torch.cat([paths_BPD, tokens_BP[:, :, None]], dim=2)
        self.scores_BP = self.new.scores_BC.gather(1, picked_BP)
        self.exists_BP = self.new.exists_BC.gather(1, picked_BP)
        before = self.found.tokens_BC.shape[1] - self.new.tokens_BC.shape[1]
        self.candidates_BP = before + picked_BP
        if states_TH is not None:
            self.states_BPH = _rows(states_TH.view(batch_size, rows, -1), above_BP)
        self.seen_BPN = _rows(self.seen_BPN, above_BP)

    def show_ancestors(self, mask_BPN: Tensor) -> None:
        """Fill in which nodes each row of a level sees: what its parent saw, and itself."""
        itself = torch.eye(self.topk, dtype=torch.bool, device=mask_BPN.device)
        self.seen_BPN = torch.cat([self.seen_BPN, itself.expand(len(mask_BPN), -1, -1)], dim=2)
        mask_BPN.copy_(self.seen_BPN)

    def proposal(self, limits: list[int]) -> DraftProposal:
        """limits: the most nodes of each request, root included."""
        sizes = tree_sizes(self.levels, self.topk)
        num_nodes = [min(pair) for pair in zip(sizes, limits, strict=True)]
        selection = select(self.roots_B1, self.found, num_nodes)
        if self.weights:  # a distribution over few tokens has few children: ask the device
            count = self.found.tokens_BC.shape[1]
            num_nodes = (1 + (selection.candidates_BM < count).sum(1)).tolist()
        return DraftProposal(
            tokens=selection.tokens_BN,
            parents=selection.parents_BN,
            num_nodes=num_nodes,
            is_chain=False,
            draft_probs=self._draft_probs(selection),
            confidence=self._confidence(selection),
            ranks=None if self.weights else [range(count) for count in num_nodes],
        )

    def _confidence(self, selection: Selection) -> Tensor | None:
        """[B, N]; None where scores are ranks, not probabilities."""
        if self.weights or self.choice.by_rank:
            return None
        last = self.found.scores_BC.shape[1] - 1
        scores_BM = self.found.scores_BC.gather(1, selection.candidates_BM.clamp(max=last))
        return torch.cat([torch.zeros_like(scores_BM[:, :1]), scores_BM], dim=1).exp()

    def _draft_probs(self, selection: Selection) -> Tensor | None:
        """[B, N, V], of each node the weights that it was drawn from."""
        if not self.weights:
            return None
        # Rows in order: the root, then topk of each level, each with topk candidates side by side.
        rows_BM = selection.candidates_BM.clamp(max=self.found.tokens_BC.shape[1] - 1) // self.topk
        rows_BN = torch.cat([torch.zeros_like(self.roots_B1), rows_BM], dim=1)
        return _rows(torch.cat(self.weights, dim=1), rows_BN)


def tree_sizes(levels: list[int], topk: int) -> list[int]:
    """Nodes that trees so deep find, root included."""
    return [1 + topk + (depth - 1) * topk**2 if depth else 1 for depth in levels]


def _blank_tree(batch_size: int, topk: int, level: int, device: torch.device) -> Tree:
    """That of the nodes of one level, which see nothing yet."""
    past = (level - 1) * topk
    depths_T = torch.full((batch_size * topk,), level - 1, device=device)
    mask = torch.zeros(batch_size, topk, past + topk, dtype=torch.bool, device=device)
    return Tree(depths_T, mask, num_past=past)


def _rows(x_BPX: Tensor, rows_BQ: Tensor) -> Tensor:
    """[B, Q, X], rows of each request."""
    return x_BPX.gather(1, rows_BQ[:, :, None].expand(-1, -1, x_BPX.shape[2]))
