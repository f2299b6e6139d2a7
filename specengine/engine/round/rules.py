"""Rules of acceptance on the device: which drafts are accepted, and the token after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.rows import RowBatch
from specengine.engine.round.draws import DraftWeights
from specengine.engine.round.layouts import Nodes
from specengine.engine.round.sampling import SamplingState
from specengine.kernels.accept.types import Accepted, Draws, RelaxedRound, SampledRound, row_sums
from specengine.kernels.tree.types import DraftTree
from specengine.layers.sampler import RowDraws
from specengine.target.verify.sampled import keyed_draws


@dataclass(frozen=True)
class Judged:
    """What a rule looks at."""

    logits_TV: Tensor  # float32, edited and masked, a row a node; may be written over
    rows: RowBatch
    batch: ForwardBatch  # the verification
    nodes: Nodes
    sample: Callable[[LogitsOutput, RowDraws], Tensor]  # ModelRunner.sample
    tree: DraftTree | None
    weights: DraftWeights | None


class Rule(Protocol):
    """A rule that verifies drafts by more than the tokens that the target chose. Where the target's
    tokens are enough, layouts match drafts with them in one kernel, without a Rule.

    The text of a seed depends on the drafts that such a rule sees: each request must have
    those that the host would draft for it, and no other node may exist.
    """

    is_lossy: bool
    needs_draft_probs: bool  # it reads what sampled drafts were drawn from
    greedy_too: bool  # whether it verifies the drafts of greedy requests

    def decide(self, judged: Judged, sampling: SamplingState) -> Accepted: ...


@runtime_checkable
class StochasticVerifier(Protocol):
    """What a verifier has whose device_rule is "stochastic"."""

    needs_draft_probs: bool

    def has_keyed_numbers(self) -> bool:
        """Whether its numbers are those that rounds on the device draw."""
        ...

    def decide(self, drafts: SampledRound, draws: Draws) -> Accepted: ...


@runtime_checkable
class RelaxedVerifier(Protocol):
    """What a verifier has whose device_rule is "relaxed"."""

    def decide(self, drafts: RelaxedRound) -> Accepted: ...


class Stochastic:
    """A lossless rule for sampling requests: the target's probabilities against the draft's."""

    is_lossy = False
    greedy_too = False  # matching accepts as much

    def __init__(self, verifier: StochasticVerifier) -> None:
        self.verifier = verifier
        self.needs_draft_probs = verifier.needs_draft_probs

    def decide(self, judged: Judged, sampling: SamplingState) -> Accepted:
        rows, nodes = judged.rows, judged.nodes
        weights_TV = sampling.target_weights(judged.logits_TV, rows)
        weights = judged.weights
        drafts = SampledRound(
            target_TV=weights_TV,
            target_sum_T=row_sums(weights_TV),
            draft_BNV=None if weights is None else weights.drawn_from(judged.tree),
            tokens_BN=nodes.tokens_BN,
            parents_BN=nodes.parents_BN,
            exists_BN=nodes.exists_BN,
            depths_BN=nodes.depths_BN,
            roots_B=nodes.roots_B,
            greedy_B=sampling.are_greedy(rows),
            numbers_BN=nodes.numbers_BN,
        )
        return self.verifier.decide(drafts, keyed_draws(*sampling.keys(rows)))


class Relaxed:
    """Lossy: drafts that are nearly as good as the target's own token are accepted too."""

    is_lossy = True
    needs_draft_probs = False
    greedy_too = True

    def __init__(self, verifier: RelaxedVerifier) -> None:
        self.verifier = verifier

    def decide(self, judged: Judged, sampling: SamplingState) -> Accepted:
        """The drafts are compared with the edited logits, which must stay as they are."""
        nodes, draws = judged.nodes, sampling.draws(judged.rows, judged.batch, in_place=False)
        chosen_T = judged.sample(LogitsOutput(judged.logits_TV), draws)
        lacks_BN = ~nodes.exists_BN
        drafts = RelaxedRound(
            logits_TV=judged.logits_TV,
            chosen_T=chosen_T,
            tokens_BN=nodes.tokens_BN.masked_fill(lacks_BN, -1),
            parents_BN=nodes.parents_BN.masked_fill(lacks_BN, -1),
            counts_B=nodes.counts_B,
            roots_B=nodes.roots_B,
        )
        return self.verifier.decide(drafts)
