"""Commits one token a round, so that drafts are made at every position of the output."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specengine.core.batch import ModelWorkerBatch, ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.spec import DraftProposal, Verifier, VerifyResult


@dataclass(frozen=True)
class OneTokenVerifier:
    """Decides as the verifier in it does, and keeps the first emitted token only. That token has
    the target's distribution, as every lossless rule's first token has; where drafts are matched
    it is plain decoding's own."""

    device_rule = None  # rounds on the device decide otherwise

    verifier: Verifier

    @property
    def text_depends_on_drafts(self) -> bool:
        return self.verifier.text_depends_on_drafts

    def prepare(self, batch: ScheduleBatch, proposal: DraftProposal) -> ModelWorkerBatch:
        return self.verifier.prepare(batch, proposal)

    def accept(
        self, output: LogitsOutput, batch: ScheduleBatch, proposal: DraftProposal
    ) -> VerifyResult:
        result = self.verifier.accept(output, batch, proposal)
        keep, logprobs = result.kv_keep, result.logprobs
        return replace(
            result,
            tokens=[tokens[:1] for tokens in result.tokens],
            num_accepted=[0] * len(result.tokens),
            kv_keep=None if keep is None else [path[:1] for path in keep],
            logprobs=None if logprobs is None else [one[:1] for one in logprobs],
        )
