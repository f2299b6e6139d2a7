"""STANDALONE: a smaller model of the same vocabulary drafts (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.draft_context import DraftContext
from specengine.core.draft_picks import DraftPicks
from specengine.core.drafter import DraftsOn
from specengine.core.interfaces import LogitsOutput, RowsOutput
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.spec import DraftProposal, PrefillResult, VerifyResult
from specengine.core.transfer import sent
from specengine.draft.standalone.load import load_standalone
from specengine.draft.tree_worker import TreeDraftWorker
from specengine.runner.forward_graphs.prepared import PreparedForward


class StandaloneWorker(TreeDraftWorker):
    """Token i has its KV in slot i, as in the target. Prefill follows the target's, chunk by chunk;
    KV of a cached prefix was written by the request that brought the prefix. A round begins by
    catching up from the last token whose KV is right to the root: after a chain that was accepted
    whole these are two, its last token was never run; after a tree all that it gave, for its nodes
    have theirs in no order.

    Rounds on the device always run two, the token before the root (`previous`) and the root. So
    whatever a round was, all before those two have their KV when it ends.

    A request that leaves may leave its last round's tokens without KV of the draft in the cache.
    Drafts that read them later are worse for it; the output is not, whatever a draft says.
    """

    load_draft = staticmethod(load_standalone)
    first_place = 1
    unguarded = ("_proposal",)

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context)
        device = self.runner.device
        self.previous = torch.zeros(context.num_rows, dtype=torch.int64, device=device)
        self.written: dict[Req, int] = {}  # tokens whose KV is right, as the host knows it
        self._known: dict[Req, int] = {}  # kv_len that this was known of
        self._proposal: DraftProposal | None = None  # of this round

    def begin(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        self._read(batch)

    def begin_async(self, batch: ScheduleBatch, output: LogitsOutput, tokens_S: Tensor) -> None:
        self._read(batch)

    @torch.inference_mode()
    def _read(self, batch: ScheduleBatch) -> None:
        """Prompts, whatever the target says to them."""
        lens = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        ends = [prefix + extend for prefix, extend in lens]
        self._catch_up(
            batch.reqs, [self._start(req) for req in batch.reqs], ends, with_logits=False
        )
        pairs = list(zip(batch.reqs, ends, strict=True))
        if self.device_rounds:
            self._remember(batch.reqs, [req.token_ids[end - 1] for req, end in pairs])
        self._known.update(pairs)

    def start(self, batch: ScheduleBatch) -> LogitsOutput:
        starts = [self._start(req) for req in batch.reqs]
        ends = [prefix + 1 for prefix in batch.prefix_lens]
        return LogitsOutput(self._catch_up(batch.reqs, starts, ends, with_logits=True).logits)

    def run_level(
        self, level: int, step: PreparedForward, tokens_T: Tensor, states_TH: Tensor | None
    ) -> LogitsOutput:
        """It continues tokens alone."""
        return LogitsOutput(step.run(tokens_T).logits)

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        self._proposal = super().draft(batch)
        return self._proposal

    @torch.inference_mode()
    def observe(self, batch: ScheduleBatch, output: LogitsOutput, result: VerifyResult) -> None:
        """Emitted tokens that it drafted and ran itself, in a chain, have their KV in place. Others
        may have drafted what was verified. The last token is run again, whatever its source: the
        next round starts from its logits."""
        proposal, self._proposal = self._proposal, None
        agreed = _agreed(proposal, result.tokens)
        for req, emitted, count in zip(batch.reqs, result.tokens, agreed, strict=True):
            self.written[req] = self._start(req) if count is None else req.kv_len + 1 + count
            self._known[req] = req.kv_len + len(emitted)
        if self.device_rounds:
            self._hand_over(batch.reqs, result.tokens)

    def release(self, req: Req) -> None:
        self.written.pop(req, None)
        self._known.pop(req, None)

    @property
    def drafts_on(self) -> DraftsOn:  # type: ignore[override]
        return "device" if self.device_rounds else "host"

    def root_states(self, rows: RowBatch) -> Tensor:
        """The states at the roots, [B, H]. The last two tokens of each request are run."""
        step = self.runner.new_row_batch(_one_back(rows), self._last_two(rows))
        return self.runner.forward_extend(step)[1::2]

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: DraftPicks | None = None) -> Tensor:
        states_BH = self.root_states(rows)
        tokens: list[Tensor] = []
        for level in range(num_steps):
            if level > 0:
                step = self.runner.new_row_batch(rows, tokens[-1][:, None], offset=level)
                states_BH = self.runner.forward_decode(step)
            tokens.append(self.next_tokens(states_BH, picks))
        none_B0 = rows.roots_B.new_empty(len(rows.roots_B), 0)
        return torch.stack(tokens, dim=1) if tokens else none_B0

    def sync_accepted(self, rows: RowBatch, tokens_BN: Tensor) -> None:
        """Runs all but the two that the next round would run if every draft were accepted. Rejected
        rows run too; the next round overwrites their KV. Of trees `observe_rows` runs
        the path."""
        run_BN = self._last_two(rows)
        if not self.proposes_tree:
            run_BN = torch.cat([run_BN, tokens_BN[:, :-2]], dim=1)
        self.runner.forward_extend(self.runner.new_row_batch(_one_back(rows), run_BN))

    def observe_rows(
        self, rows: RowBatch, output: RowsOutput, tokens_BN: Tensor, accepted_B: Tensor
    ) -> None:
        """What lies before a path's last token is run again, as a chain; of shorter paths more
        than that, which the next round writes over."""
        run_BN = torch.cat([rows.roots_B[:, None], tokens_BN], dim=1)
        self.previous[rows.rows_B] = run_BN.gather(1, accepted_B[:, None])[:, 0]
        path_BW = tokens_BN[:, :-2]
        if self.proposes_tree and path_BW.shape[1]:
            self.runner.forward_extend(self.runner.new_row_batch(rows, path_BW, offset=1))

    def _last_two(self, rows: RowBatch) -> Tensor:
        """int64 [B, 2], the tokens that a round on the device starts from."""
        return torch.stack([self.previous[rows.rows_B], rows.roots_B], dim=1)

    def _start(self, req: Req) -> int:
        """The first token to run. Rounds on the device report nothing to the host, but leave
        two."""
        known = self._known.get(req)
        if known is not None and known != req.kv_len:
            return req.kv_len - 1
        return self.written.get(req, req.kv_len)

    def _catch_up(
        self, reqs: Sequence[Req], starts: list[int], ends: list[int], with_logits: bool
    ) -> LogitsOutput:
        """Run the tokens of each request from the first without KV up to its end."""
        spans = zip(reqs, starts, ends, strict=True)
        tokens = [req.token_ids[start:end] for req, start, end in spans]
        self.written.update(zip(reqs, ends, strict=True))
        return self.plan_extend(reqs, starts, tokens, with_logits).run()

    def _hand_over(self, reqs: Sequence[Req], emitted: list[list[int]]) -> None:
        """Leave what a round on the device starts from."""
        texts = [req.token_ids + run for req, run in zip(reqs, emitted, strict=True)]
        self._remember(reqs, [text[-2] for text in texts])
        behind = [
            (req, self.written[req], text[self.written[req] : -2])
            for req, text in zip(reqs, texts, strict=True)
            if self.written[req] < len(text) - 2
        ]
        if behind:
            late, starts, tokens = (list(column) for column in zip(*behind, strict=True))
            self.plan_extend(late, starts, tokens, with_logits=False).run()
            self.written.update((req, start + len(run)) for req, start, run in behind)

    def _remember(self, reqs: Sequence[Req], tokens: list[int]) -> None:
        """The token before the root of each."""
        values = torch.tensor([[req.row for req in reqs], tokens])
        rows_B, tokens_B = sent(values, self.previous.device)
        self.previous[rows_B] = tokens_B


def _one_back(rows: RowBatch) -> RowBatch:
    """From the token before each root on."""
    return RowBatch(rows.rows_B, (rows.lens_B - 1).clamp(min=0), rows.roots_B)


def _agreed(proposal: DraftProposal | None, emitted: list[list[int]]) -> list[int | None]:
    """How many emitted tokens of each request the drafter has run as its own drafts; None where
    it drafted nothing."""
    if proposal is None or proposal.is_empty:
        return [None] * len(emitted)
    if not proposal.is_chain:
        return [None if count == 1 else 0 for count in proposal.num_nodes]
    drafts = zip(proposal.tokens.tolist(), proposal.num_nodes, strict=True)
    return [
        None if count == 1 else _agreeing(nodes[1 : count - 1], run[:-1])
        for (nodes, count), run in zip(drafts, emitted, strict=True)
    ]


def _agreeing(left: list[int], right: list[int]) -> int:
    """Tokens that two runs begin with in common."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in pairs)
