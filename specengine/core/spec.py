"""What a round proposes and decides. Its drafter's interface is core/drafter.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from specengine.core.spec_stats import DepthChoice

if TYPE_CHECKING:
    from specengine.core.batch import ModelWorkerBatch, ScheduleBatch
    from specengine.core.interfaces import LogitsOutput
    from specengine.core.request import TokenLogprob


@dataclass
class DraftProposal:
    """A tree of candidate tokens a request. Node 0 is the root: the last chosen token, whose KV is
    not written yet. Nodes are in topological order (a parent comes before its children), and the
    children of a node in order of preference.

    An empty proposal has the root alone; decoding without speculation is exactly that.

    draft_probs are for tokens that were sampled. Row i is the distribution, up to a factor, that
    the token of node i was really drawn from: after temperature, top-k and whatever else the
    drafter applies. Siblings are drawn from one distribution without replacement; each of their
    rows is that distribution before any token was taken out. The row of a token that was certain
    has its mass on that token alone. The root's row is not read, nor are those of greedy requests.
    Whether a node exists may depend on the tokens above it, but neither on its own token nor on
    those drawn beside or below it: that would bias the output.
    """

    tokens: Tensor  # int64 [B, N]; entries past num_nodes are undefined
    parents: Tensor  # int64 [B, N]; the root's is -1
    num_nodes: list[int]  # [B], 1 .. N, root included
    is_chain: bool  # parents[i] == i - 1 throughout: no tree mask, no KV to move
    draft_probs: Tensor | None = None  # float32 [B, N, V]; None where every draft is deterministic
    # [B, N] in 0..1: the estimated probability that the whole path down to a node is accepted
    confidence: Tensor | None = None
    # [B][num_nodes], ascending from the root's 0, where the drafter draws no sample and knows which
    # nodes promise the most: node i is the ranks[b][i]-th, so that the first n are the best n.
    ranks: Sequence[Sequence[int]] | None = None
    # Whether each request's draft came from lookup, in a drafter that has a model too. None where
    # all drafts have the same source.
    from_lookup: list[bool] | None = None

    @property
    def num_drafted(self) -> list[int]:
        return [n - 1 for n in self.num_nodes]

    @property
    def is_empty(self) -> bool:
        """No request has a draft."""
        return max(self.num_nodes, default=1) == 1


@dataclass
class VerifyResult:
    """What one round decided, on the host."""

    tokens: list[list[int]]  # emitted tokens of each request: accepted drafts, then the bonus
    num_accepted: list[int]  # [B], without the bonus token
    num_drafted: list[int]  # [B]
    kv_keep: list[list[int]] | None  # node indices on the accepted path, root first; None: a chain
    logprobs: list[list[TokenLogprob]] | None = None  # beside tokens, where any request asks
    is_lossy: bool = False  # the rule does not keep the target's distribution
    depth: DepthChoice | None = None  # that the round ran under; the engine fills it in
    # [B], the ranks of the accepted drafts, where the proposal has ranks; the engine fills it in.
    path_ranks: list[list[int]] | None = None


class Verifier(Protocol):
    """Decides which drafted tokens are accepted: what a round on the host calls. Rules that are not
    lossy keep the target's distribution. To write one, subclass
    target.verify.base.TreeVerifier: the engine reads its other fields too.

    device_rule: how rounds on the device decide as it does; None where they cannot.
    text_depends_on_drafts: whether the tokens of a seed depend on which drafts were verified.
    """

    @property
    def device_rule(self) -> str | None: ...

    @property
    def text_depends_on_drafts(self) -> bool: ...

    def prepare(self, batch: ScheduleBatch, proposal: DraftProposal) -> ModelWorkerBatch: ...

    def accept(
        self, output: LogitsOutput, batch: ScheduleBatch, proposal: DraftProposal
    ) -> VerifyResult: ...


class RoundRecorder(Protocol):
    """Looks at rounds and changes nothing: traces, acceptance tables. Called after acceptance and
    before the tokens are committed; `output` has a row of logits a node that was verified."""

    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None: ...


@dataclass
class PrefillResult:
    """What a prefill forward decided, on the host. Entries are None where nothing was asked."""

    tokens: list[int | None]  # [B], the first token of each request that samples
    logprobs: list[TokenLogprob | None]  # [B], of those tokens
    prompt_logprobs: list[list[TokenLogprob | None]]  # [B], of the prompt tokens of this chunk
