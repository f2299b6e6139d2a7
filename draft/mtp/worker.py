"""MTP: layers trained with the target draft for it (DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.batch import ForwardMode, ModelWorkerBatch, ScheduleBatch
from specengine.core.draft_context import DraftContext
from specengine.core.draft_picks import DraftPicks
from specengine.core.drafter import DraftsOn
from specengine.core.interfaces import LogitsOutput, RowsOutput
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.transfer import sent
from specengine.core.tree import Tree
from specengine.draft.eagle.worker import EagleWorker
from specengine.draft.mtp.load import load_mtp
from specengine.draft.mtp.rows import LayerRows
from specengine.kernels.kv.keep_rows import keep_rows
from specengine.runner.forward_graphs.prepared import PreparedForward


class MtpWorker(EagleWorker):
    """One layer for every step. It is EAGLE's loop: the layer takes the target's last state and the
    next token, and afterwards its own states."""

    load_draft = staticmethod(load_mtp)
    narrows = False

    @classmethod
    def from_context(cls, context: DraftContext) -> MtpWorker:
        """For one layer or several."""
        return (MtpWorker if len(context.runners) == 1 else MtpLayersWorker)(context)


class MtpLayersWorker(MtpWorker):
    """A layer a step. Layer k continues layer k - 1: its row i takes (state_i of layer k - 1,
    token_{i+1+k}), at position i and in its own KV of that slot. Of a text whose last token is n,
    layer k so has rows up to n - 1 - k; each is one row behind the layer before it, and the state
    that waits there is kept in `states`.

    A round drafts through the layers: layer 0 is at the root already, layer k runs its last k rows
    on the k tokens drafted so far. Those are the rows that it will run again on what was accepted.

    On the device alone, layer k runs its rows of a round k places before those of layer 0; there
    must be as many.

    A request begins with the first token that no cached prefix had: layer k has its rows from there
    on, and drafts no deeper than there are rows. Where texts follow the drafts, the cache looks at
    as many of the next tokens as there are layers, and is not given rows that a layer still writes;
    else the last k rows of a shared prefix may hold what another request drafted, which costs a
    little acceptance at most.
    """

    unguarded = ("_path_BD", "_rows_B")
    may_be_unready = True

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context)
        self.kv_lookahead = len(self.runners)
        self.layer_states = self.states.new_zeros(len(self.runners), *self.states.shape)
        self.states = self.layer_states[0]
        for runner in self.runners:
            runner.first_keys = self.runner.first_keys
        self._first: dict[Req, int] = {}  # its first row
        # of this round
        self._path_BD = torch.empty(0)  # tokens drafted so far
        self._rows_B = torch.empty(0)

    @property
    def drafts_on(self) -> DraftsOn:  # type: ignore[override]
        return "device" if self.device_rounds else "host"

    @property
    def begins_async(self) -> bool:  # type: ignore[override]
        """Each layer's tokens are laid out on the host."""
        return False

    def is_ready(self, req: Req) -> bool:
        """Rows before its first one may be another request's, too."""
        return req.kv_len - self._first[req] >= len(self.runners) - 1

    def release(self, req: Req) -> None:
        self._first.pop(req, None)

    def levels(self, req: Req) -> int:
        return min(super().levels(req), req.kv_len - self._first[req] + 1)

    def extend_states(
        self, batch: ScheduleBatch, tokens: list[list[int]], features: Tensor
    ) -> None:
        """Every layer over what is known to it now, one row after the other."""
        firsts = [
            self._first.setdefault(req, start)
            for req, start in zip(batch.reqs, batch.prefix_lens, strict=True)
        ]
        rows = LayerRows(batch.reqs, firsts, batch.prefix_lens, tokens)
        for layer, states in enumerate(self.layer_states):
            if not rows.reqs:
                return
            step = self.plan_extend(rows.reqs, rows.starts, rows.tokens, False, layer)
            output = step.run(features_TF=features)
            assert output.hidden is not None
            features = rows.inputs_of_next(states[step.req_pool_indices], output.hidden)
            states[step.req_pool_indices] = output.hidden[step.last_rows]
            rows = rows.of_next()

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        if num_steps == 0:
            return rows.roots_B.new_empty(len(rows.roots_B), 0)
        waiting_LBH = self.layer_states.index_select(1, rows.rows_B)
        states_BWH = waiting_LBH[0, :, None]
        path_BD = self.next_tokens(waiting_LBH[0], picks)[:, None]
        for layer in range(1, num_steps):
            new_BWH = self._run_rows(layer, rows, path_BD, states_BWH)
            last_B = self.next_tokens(new_BWH[:, -1].contiguous(), picks, layer)
            path_BD = torch.cat([path_BD, last_B[:, None]], dim=1)
            states_BWH = torch.cat([waiting_LBH[layer, :, None], new_BWH], dim=1)
        return path_BD

    def observe_rows(
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        """Rows past the accepted ones run along; later rounds write over what they leave."""
        waiting_LBH = self.layer_states.index_select(1, rows.rows_B)
        states_BNH = self.features(output, None).view(*tokens_BN.shape, -1)
        for layer, states in enumerate(self.layer_states):
            new_BNH = self._run_rows(layer, rows, tokens_BN, states_BNH)
            keep_rows(states, rows.rows_B, new_BNH.flatten(0, 1), accepted_B)
            states_BNH = torch.cat([waiting_LBH[layer, :, None], new_BNH[:, :-1]], dim=1)

    def _run_rows(
        self, layer: int, rows: RowBatch, tokens_BW: Tensor, states_BWH: Tensor
    ) -> Tensor:
        """[B, W, H], of the W rows from `layer` places before the root on."""
        if layer:
            rows = RowBatch(rows.rows_B, (rows.lens_B - layer).clamp(min=0), rows.roots_B)
        step = self.runners[layer].new_row_batch(rows, tokens_BW)
        step.features = states_BWH.flatten(0, 1)
        return self.runners[layer].forward_extend(step).view(states_BWH.shape)

    def start(self, batch: ScheduleBatch) -> LogitsOutput:
        device = self.runner.device
        self._path_BD = torch.empty(batch.batch_size, 0, dtype=torch.int64, device=device)
        rows = torch.tensor([req.row for req in batch.reqs])
        self._rows_B = sent(rows, device)
        output = super().start(batch)
        assert output.hidden is not None
        return LogitsOutput(output.logits, hidden=output.hidden[:0])

    def plan_level(
        self, batch: ScheduleBatch, levels: list[int], level: int, tree: Tree | None = None
    ) -> PreparedForward:
        """The last `level` rows of layer `level`, up to the one before the root."""
        assert tree is None, "load_mtp refuses trees"
        runs = [depth > level for depth in levels]
        reqs = zip(batch.reqs, runs, strict=True)
        roots = zip(batch.prefix_lens, runs, strict=True)
        return self.runner_of(level).prepare(
            ModelWorkerBatch(
                forward_mode=ForwardMode.DRAFT_EXTEND if level > 1 else ForwardMode.DECODE,
                input_ids=torch.zeros(batch.batch_size * level, dtype=torch.int64),
                req_pool_indices=[req.row if run else 0 for req, run in reqs],
                prefix_lens=[root - level if run else 0 for root, run in roots],
                extend_lens=[level] * batch.batch_size,
                logits_rows=[level * (i + 1) - 1 for i in range(batch.batch_size)],
                sampling=None,
            )
        )

    def run_level(
        self, level: int, step: PreparedForward, tokens_T: Tensor, states_TH: Tensor | None
    ) -> LogitsOutput:
        """tokens_T: one a request. states_TH: of the rows of the layer before in this round; the
        state before them waits."""
        assert states_TH is not None
        self._path_BD = torch.cat([self._path_BD, tokens_T[:, None]], dim=1)
        waiting_BH = self.layer_states[level - 1][self._rows_B]
        drafted = states_TH.view(len(waiting_BH), level - 1, waiting_BH.shape[1])
        features_TH = torch.cat([waiting_BH[:, None], drafted], dim=1).flatten(0, 1)
        return step.run(self._path_BD.flatten(), features_TH)
