"""Verification of deterministic drafts: keep what the target would have said anyway."""

from __future__ import annotations

from specengine.core.interfaces import LogitsOutput
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.layers.sampler import Sample, Sampler
from specengine.target.verify.base import DeviceRule, TreeVerifier
from specengine.target.verify.rows import row_map
from specengine.target.verify.walk import Walk, walk_all


class MatchVerifier(TreeVerifier):
    """At every node the target's token is sampled exactly as plain decoding would sample it there:
    same logits pipeline, same uniform, keyed by the request's seed and the output position that the
    node decides. The walk then goes from the root to the child that carries the sampled token, as
    long as there is one, and emits the tokens sampled along it; the last is the bonus.

    Lossless by construction: by induction over the walk, the text above each visited node is what
    plain decoding has produced, so the token sampled there is the one that plain decoding produces
    next. For the same logits the output is identical seed by seed, not just in distribution; greedy
    decoding is the special case that needs no uniform. No two positions share a uniform.

    No lossless rule accepts more of a draft fixed in advance: it emits each child of a node with
    the target's probability of that token, so some child is accepted with at most the sum of their
    probabilities. This rule reaches the sum, as target-only tree sampling does.

    Of drafts that were themselves sampled, rules that know the draft's probabilities accept more.
    """

    device_rule: DeviceRule | None = "match"
    keeps_logits = False

    def __init__(self, sampler: Sample | None = None) -> None:
        self.sampler = sampler or Sampler()

    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        if proposal.is_empty:
            return [Walk([0], [token]) for token in self.sampler(output, sampling).tolist()]
        sampled_T = self.sampler(output, sampling, row_map(proposal, sampling))
        return walk_all(proposal, sampled_T.tolist())
