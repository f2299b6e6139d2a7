"""DFlash: a block of drafts in one forward, over what the target saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from specengine.core.batch import ForwardMode, ModelWorkerBatch, ScheduleBatch
from specengine.core.draft_picks import DraftPicks
from specengine.core.interfaces import LogitsOutput, RowsOutput
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.spec import DraftProposal, PrefillResult
from specengine.core.tree import Tree
from specengine.draft.chain import batch_roots, chain_proposal
from specengine.draft.choice import DraftChoice
from specengine.draft.dflash.load import load_dflash
from specengine.draft.dflash.model import DFlashModel
from specengine.draft.eagle.worker import EagleWorker


class DFlashWorker(EagleWorker):
    """A position's slot has the draft's KV of the target's features there. A round's block lies
    in the slots of its own positions, root first, until the accepted ones' features are written
    over it. The root's own features come with the verification that begins with it.

    Blocks of one length run together; what a request may not use of its block is left out.
    """

    load_draft = staticmethod(load_dflash)
    takes_token_map = False
    drafts_trees = False
    has_draft_loops = False
    kv_lookahead = 0
    draft_slots = 0
    narrows = False

    def features(self, output: LogitsOutput | RowsOutput, rows: Tensor | None) -> Tensor:
        assert output.features is not None
        features = output.features if rows is None else output.features[rows]
        return self.model.fuse(features)

    @property
    def model(self) -> DFlashModel:
        return cast(DFlashModel, self.runner.model)

    @torch.inference_mode()
    def begin(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        self._write(batch, self.features(output, None))

    @torch.inference_mode()
    def begin_async(self, batch: ScheduleBatch, output: LogitsOutput, tokens_S: Tensor) -> None:
        self._write(batch, self.features(output, None))

    def _write(self, batch: ScheduleBatch, features: Tensor) -> None:
        self._see_all(self._rows_of(batch.prompt_reqs))
        self.extend_states(batch, [[0] * count for count in batch.extend_lens], features)

    def extend_states(
        self, batch: ScheduleBatch, tokens: list[list[int]], features: Tensor
    ) -> None:
        """Write KV of as many positions as there are tokens, from each root's on."""
        step = self.plan_extend(batch.reqs, batch.prefix_lens, tokens, with_logits=False)
        step.run(features_TF=features)

    @torch.inference_mode()
    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        """Tensors are on the device."""
        depths = [self._depth(req) for req in batch.reqs]
        levels = [min(self.levels(req), most) for req, most in zip(batch.reqs, depths, strict=True)]
        tokens_BN = batch_roots(batch, self.runner.device)
        if not any(levels):
            return chain_proposal(tokens_BN, [1] * batch.batch_size, [])
        logits_BDV = self._block_logits(batch, depths)
        choice = DraftChoice(batch.sampling, self.target_ids, draws=self.emits_probs)
        weights: list[Tensor] = []
        for level in range(max(levels)):
            paths_BD, logits_BV = tokens_BN[:, 1:], logits_BDV[:, level]
            if choice.random is None:
                new_B1 = choice.best(logits_BV, paths_BD)[:, None]
            else:
                chosen = choice.children(logits_BV, paths_BD, count=1, first_node=level + 1)
                assert chosen.weights_RV is not None
                new_B1 = chosen.tokens_RK
                weights.append(chosen.weights_RV)
            tokens_BN = torch.cat([tokens_BN, new_B1], dim=1)
        return chain_proposal(tokens_BN, [1 + depth for depth in levels], weights)

    def _depth(self, req: Req) -> int:
        """Masks of its block: all rows of a block see each other, so that a shorter one would draft
        other tokens. As many as ever, where slots are reserved for them."""
        return max(0, min(self.num_steps, req.reserved_len - req.kv_len - 1))

    def _block_logits(self, batch: ScheduleBatch, depths: list[int]) -> Tensor:
        """float32 [B, D, V], zeros past a request's own depth."""
        shape = len(depths), max(depths), self.model.vocab_size
        logits_BDV = torch.zeros(shape, device=self.runner.device)
        for depth in sorted({depth for depth in depths if depth > 0}):
            members = [index for index, one in enumerate(depths) if one == depth]
            reqs = [batch.reqs[index] for index in members]
            found = self._run_blocks(reqs, [batch.prefix_lens[i] for i in members], depth)
            places = torch.tensor(members, device=logits_BDV.device)
            logits_BDV[places, :depth] = found.view(len(members), depth, -1)
        return logits_BDV

    def _run_blocks(self, reqs: Sequence[Req], starts: list[int], depth: int) -> Tensor:
        """float32 [B * D, V], of the masked rows."""
        width, count = depth + 1, len(reqs)
        tokens = [[req.last_token, *[self.model.form.mask_token_id] * depth] for req in reqs]
        step = self.runner.prepare(
            ModelWorkerBatch(
                forward_mode=ForwardMode.DRAFT_EXTEND,
                input_ids=torch.tensor(tokens, dtype=torch.int64).flatten(),
                req_pool_indices=[req.row for req in reqs],
                prefix_lens=starts,
                extend_lens=[width] * count,
                logits_rows=[row for row in range(count * width) if row % width],
                sampling=None,
                tree=block_tree(count, width, self.runner.device),
            )
        )
        return step.run().logits

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        count, width = len(rows.roots_B), num_steps + 1
        if num_steps == 0:
            return rows.roots_B.new_empty(count, 0)
        masks_BD = rows.roots_B.new_full((count, num_steps), self.model.form.mask_token_id)
        tokens_BW = torch.cat([rows.roots_B[:, None], masks_BD], dim=1)
        tree = block_tree(count, width, rows.roots_B.device)
        step = self.runner.new_row_batch(rows, tokens_BW, tree=tree)
        states_BWH = self.runner.forward_extend(step).view(count, width, -1)
        if picks is None:
            best: Tensor = self.model.head.best(states_BWH[:, 1:].flatten(0, 1))
            return best.view(count, num_steps)
        drafted = [
            self.next_tokens(states_BWH[:, level].contiguous(), picks) for level in range(1, width)
        ]
        return torch.stack(drafted, dim=1)

    def observe_rows(
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        """Rows past the accepted ones run along; the next round writes over what they leave."""
        step = self.runner.new_row_batch(rows, tokens_BN)
        step.features = self.features(output, None)
        self.runner.forward_extend(step)


def block_tree(count: int, width: int, device: torch.device) -> Tree:
    """Blocks whose every row sees every row of its own."""
    depths_T = torch.arange(width, device=device).repeat(count)
    return Tree(depths_T, torch.ones(count, width, width, dtype=torch.bool, device=device))
