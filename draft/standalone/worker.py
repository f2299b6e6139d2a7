"""STANDALONE: a smaller model of the same vocabulary drafts (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.config import SpecConfig
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.spec import DraftProposal, PrefillResult, VerifyResult
from specengine.draft.worker import DraftWorker
from specengine.runner.model_runner import ModelRunner
from specengine.runner.prepared import PreparedForward


class StandaloneWorker(DraftWorker):
    """Token i has its KV in slot i, as in the target. Prefill follows the target's, chunk by chunk;
    KV of a cached prefix was written by whoever brought the prefix there. A round begins by
    catching up from the last token whose KV is right to the root: after a chain that was accepted
    whole these are two, its last token was never run.

    A request that leaves may leave its last round's tokens without KV of the draft in the cache.
    Drafts that read them later are worse for it; the output is not, whatever a draft says.
    """

    first_place = 1

    def __init__(
        self, runners: Sequence[ModelRunner], spec: SpecConfig, node_limit: Callable[[Req], int]
    ) -> None:
        super().__init__(runners, spec, node_limit)
        self.written: dict[Req, int] = {}  # tokens whose KV is right
        self._proposal: DraftProposal | None = None  # of this round

    @torch.inference_mode()
    def seed(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        lens = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        self._catch_up(batch, [prefix + extend for prefix, extend in lens], with_logits=False)

    def start(self, batch: ScheduleBatch) -> LogitsOutput:
        output = self._catch_up(batch, [prefix + 1 for prefix in batch.prefix_lens], True)
        return LogitsOutput(output.logits)

    def run_level(
        self, level: int, step: PreparedForward, tokens_T: Tensor, states_TH: Tensor | None
    ) -> LogitsOutput:
        """It continues tokens alone."""
        return LogitsOutput(step.run(tokens_T).logits)

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        self._proposal = super().draft(batch)
        return self._proposal

    def observe(self, batch: ScheduleBatch, output: LogitsOutput, result: VerifyResult) -> None:
        """Emitted tokens that it drafted and ran itself, in a chain, have their KV in place. Others
        may have drafted what was verified. The last token is run again whoever drafted it: the next
        round starts from its logits."""
        proposal, self._proposal = self._proposal, None
        if proposal is None or proposal.is_empty or not proposal.is_chain:
            return
        drafts = zip(proposal.tokens.tolist(), proposal.num_nodes, strict=True)
        for req, (nodes, count), emitted in zip(batch.reqs, drafts, result.tokens, strict=True):
            self.written[req] += _agreeing(nodes[1 : count - 1], emitted[:-1])

    def release(self, req: Req) -> None:
        self.written.pop(req, None)

    def _catch_up(self, batch: ScheduleBatch, ends: list[int], with_logits: bool) -> LogitsOutput:
        """Run the tokens of each request from the first without KV up to its end."""
        starts = [
            self.written.get(req, prefix)
            for req, prefix in zip(batch.reqs, batch.prefix_lens, strict=True)
        ]
        spans = zip(batch.reqs, starts, ends, strict=True)
        tokens = [req.token_ids[start:end] for req, start, end in spans]
        self.written.update(zip(batch.reqs, ends, strict=True))
        return self.plan_extend(batch.reqs, starts, tokens, with_logits).run()


def _agreeing(left: list[int], right: list[int]) -> int:
    """Tokens that two runs begin with in common."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in pairs)
