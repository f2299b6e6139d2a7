"""EAGLE's family: drafts continue the target's own hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from specengine.core.batch import ForwardMode, ScheduleBatch
from specengine.core.draft_context import DraftContext
from specengine.core.draft_picks import DraftPicks
from specengine.core.interfaces import LogitsOutput, RowsOutput
from specengine.core.last_rows import MANY_ROWS
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.spec import PrefillResult, VerifyResult
from specengine.core.transfer import int64, sent
from specengine.draft.eagle.load import load_eagle, load_eagle3
from specengine.draft.eagle.model import Eagle3Model
from specengine.draft.tree_worker import TreeDraftWorker
from specengine.kernels.kv.keep_rows import keep_rows
from specengine.runner.forward_graphs.prepared import PreparedForward


class EagleWorker(TreeDraftWorker):
    """Row i takes (feature_i, token_{i+1}) and sits at position i, in the slot of position i. So
    the row before the root knows the root already: its output is the state that a round starts
    from, and the drafted rows begin at the root's position.

    After each prefill chunk all of its rows are run, the tokens shifted by one; the last takes the
    next token of the prompt, or the one that was sampled. After verification the accepted rows are
    run again on the target's own features. Nothing else is carried from chunk to chunk and from
    round to round than the last row's state, in the request's row of `states`.

    Slots of a cached prefix are not written: their KV came with the request that brought the
    prefix. Where texts follow the drafts, the cache looks at the next token as well; else the last
    row may have seen another one where the texts part, which costs a little acceptance at most.
    """

    load_draft = staticmethod(load_eagle)
    needs_hidden = True
    takes_token_map = True
    drafts_on = "device"
    can_pause = True
    kv_lookahead = 1
    continues_states = True
    narrows = True  # whether the model heeds ForwardBatch.kept_rows

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context)
        num_rows = context.num_rows
        k_cache, _ = self.runner.pools.token_to_kv_pool.get_kv_buffer(0)
        size = self.runner.model.config.hidden_size
        self.states = torch.zeros(num_rows, size, dtype=k_cache.dtype, device=k_cache.device)
        # Of each request, behind what was not observed while paused; row batches see nothing before
        # it.
        self.first_keys = torch.zeros(num_rows, dtype=torch.int64, device=k_cache.device)
        if context.spec.adaptive:
            self.runner.first_keys = self.first_keys

    def features(self, output: LogitsOutput | RowsOutput, rows: Tensor | None) -> Tensor:
        """[T, H], what rows of the draft model take of the target's output; None is every row."""
        assert output.hidden is not None
        return output.hidden if rows is None else output.hidden[rows]

    @torch.inference_mode()
    def begin(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        self._see_all(self._rows_of(batch.prompt_reqs))
        tokens = _shifted(batch, result.tokens)
        self.extend_states(batch, tokens, self.features(output, None))

    @torch.inference_mode()
    def begin_async(self, batch: ScheduleBatch, output: LogitsOutput, tokens_S: Tensor) -> None:
        # While the device has the prefill to do, the host has time: little, where it is slow.
        tokens = _shifted(batch, [0] * batch.batch_size)
        step = self.plan_extend(batch.reqs, batch.prefix_lens, tokens, with_logits=False)
        last_B = tokens_S
        if len(tokens_S) < batch.batch_size:
            places = [place for place, samples in enumerate(batch.samples) if samples]
            known_B = sent(int64([run[-1] for run in tokens]), tokens_S.device)
            last_B = known_B.index_copy(0, sent(int64(places), tokens_S.device), tokens_S)
        features = self.features(output, None)
        output = step.run(features_TF=features, last_B=last_B, narrows=self._narrows(features))
        is_mixed = batch.forward_mode is ForwardMode.MIXED
        self._see_all(self._rows_of(batch.prompt_reqs) if is_mixed else step.req_pool_indices)
        self._keep_last(step, output)

    def _rows_of(self, reqs: Sequence[Req]) -> Tensor:
        return sent(int64([req.row for req in reqs]), self.states.device)

    def _see_all(self, rows: Tensor) -> None:
        # Not by assignment: a number that is assigned goes by pageable memory, and waits.
        self.first_keys.index_fill_(0, rows, 0)

    def start(self, batch: ScheduleBatch) -> LogitsOutput:
        states = self.states[self._rows_of(batch.reqs)]
        return LogitsOutput(self.runner.model.head.logits(states), hidden=states)

    @torch.inference_mode()
    def observe(self, batch: ScheduleBatch, output: LogitsOutput, result: VerifyResult) -> None:
        rows: list[int] = []
        first = 0
        for i, (emitted, drafted) in enumerate(zip(result.tokens, result.num_drafted, strict=True)):
            path = range(len(emitted)) if result.kv_keep is None else result.kv_keep[i]
            rows += [first + node for node in path]
            first += drafted + 1
        every = rows == list(range(first))
        index = None if every else sent(torch.tensor(rows), self.states.device)
        self.extend_states(batch, result.tokens, self.features(output, index))

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        if num_steps == 0:
            return rows.roots_B.new_empty(len(rows.roots_B), 0)
        states_BH = self.root_states(rows)
        tokens: list[Tensor] = []
        for level in range(num_steps):
            if level > 0:
                step = self.runner.new_row_batch(rows, tokens[-1][:, None], offset=level - 1)
                step.features = states_BH
                states_BH = self.runner.forward_decode(step)
            tokens.append(self.next_tokens(states_BH, picks))
        return torch.stack(tokens, dim=1)

    def root_states(self, rows: RowBatch) -> Tensor:
        return self.states.index_select(0, rows.rows_B)

    def observe_rows(
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        """Rows past the accepted ones run along; the next round writes over what they leave."""
        step = self.runner.new_row_batch(rows, tokens_BN)
        step.features = self.features(output, None)
        if self._narrows(step.input_ids):
            step.kept_rows = step.qo_indptr[:-1] + accepted_B
            accepted_B = torch.zeros_like(accepted_B)  # one row is left of each
        states_TH = self.runner.forward_extend(step)
        keep_rows(self.states, rows.rows_B, states_TH, accepted_B)

    def mark_stale(self, rows: Tensor, lens: Tensor) -> None:
        self.first_keys[rows] = lens

    def extend_states(
        self, batch: ScheduleBatch, tokens: list[list[int]], features: Tensor
    ) -> None:
        """Run rows from the root's position on, and keep the state of each request's last one."""
        step = self.plan_extend(batch.reqs, batch.prefix_lens, tokens, with_logits=False)
        self._keep_last(step, step.run(features_TF=features, narrows=self._narrows(features)))

    def _narrows(self, rows: Tensor) -> bool:
        """Whether the model leaves out what nothing reads of these rows."""
        return self.narrows and len(rows) > MANY_ROWS

    def _keep_last(self, step: PreparedForward, output: LogitsOutput) -> None:
        assert output.hidden is not None
        last_BH, rows_B = output.hidden, step.req_pool_indices
        if len(last_BH) > len(rows_B):  # states of all rows
            last_BH = last_BH.index_select(0, step.last_rows)
        self.states.index_copy_(0, rows_B, last_BH)


def _shifted(batch: ScheduleBatch, sampled: Sequence[int | None]) -> list[list[int]]:
    """The token that follows each row of each request; the last row's was sampled where the
    prompt has no more."""
    tokens = []
    lens = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    for req, (prefix, count), first in zip(batch.reqs, lens, sampled, strict=True):
        known = req.token_ids[prefix + 1 : prefix + count + 1]
        tokens.append(known if len(known) == count else [*known, cast(int, first)])
    return tokens


class Eagle3Worker(EagleWorker):
    """EAGLE-3: the features are outputs of several target layers, or its last state, fused once."""

    load_draft = staticmethod(load_eagle3)

    def features(self, output: LogitsOutput | RowsOutput, rows: Tensor | None) -> Tensor:
        features = output.features
        if features is None:  # the draft names no layers
            return self._fuse(super().features(output, rows))
        return self._fuse(features if rows is None else features[rows])

    def _fuse(self, features: Tensor) -> Tensor:
        return cast(Eagle3Model, self.runner.model).fuse(features)
