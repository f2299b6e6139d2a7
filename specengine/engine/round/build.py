"""Composes the device rounds of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specengine.core.batch import AttentionBackend
from specengine.core.config import EngineConfig
from specengine.core.drafter import Drafter
from specengine.core.spec import Verifier
from specengine.engine.adaptive.estimate import smaller_sizes
from specengine.engine.round.device_draft import DeviceDraft
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.hybrid import HybridDraft
from specengine.engine.round.kinds import hybrid_steps, lookup_steps, model_steps
from specengine.engine.round.layouts import Branching, Chain, Commit, Layout
from specengine.engine.round.lookup import make_lookup
from specengine.engine.round.round import Round
from specengine.engine.round.rules import (
    Relaxed,
    RelaxedVerifier,
    Rule,
    Stochastic,
    StochasticVerifier,
)
from specengine.engine.round.sampling import SamplingState
from specengine.engine.round.source import Source
from specengine.kernels.accept.types import RoundState, Simulated
from specengine.runner import fallbacks
from specengine.runner.model_runner import ModelRunner


class HostRoundsError(Exception):
    """Rounds of an engine cannot run on the device. Its text is the reason, which is counted."""


@dataclass(frozen=True)
class DraftedBy:
    """Where the drafts of device rounds come from, and how deep they may go."""

    source: Source
    steps: list[int]


def make_rounds(
    config: EngineConfig,
    runner: ModelRunner,
    drafter: Drafter,
    verifier: Verifier,
    chooses: bool,
    draft_backend: AttentionBackend | None = None,
) -> RoundExecutor:
    """Not captured yet. For an engine with graphs. chooses: whether depths are chosen round by
    round, no drafts among them. draft_backend: of attention in the drafter's model, where it is not
    the runner's. Raises HostRoundsError."""
    sizes, backend = config.graph.cuda_graph_bs, runner.attn_backend
    limits, drafts = backend.limits, (draft_backend or backend).limits
    assert sizes is not None
    if limits.plans_on_host or drafts.plans_on_host:
        raise HostRoundsError(fallbacks.PLANS_ON_HOST)
    if config.trace.trace is not None:
        raise HostRoundsError(fallbacks.TRACED)
    shares = runner.sharers is not None
    if shares and (drafter.lookup is not None or drafter.drafts_on == "lookup"):
        raise HostRoundsError(fallbacks.OTHERS_WAIT)
    drafted = drafted_by(drafter, max(sizes), runner.device, chooses)
    rule = make_rule(verifier, drafter)
    cuts = chooses and drafted.source.model_is_tree and drafter.lookup is None and not shares
    return compose(
        runner,
        drafted,
        rule,
        list(sizes),
        padding=not config.graph.disable_cuda_graph_padding,
        forced_length=config.spec.simulate_accept_length,
        may_pause=chooses and drafts.first_keys and drafter.can_pause and not shares,
        tree_sizes=smaller_sizes(drafted.steps, drafted.source.num_nodes) if cuts else None,
    )


def compose(
    runner: ModelRunner,
    drafted: DraftedBy,
    rule: Rule | None,
    batch_sizes: list[int],
    padding: bool = True,
    forced_length: float | None = None,
    may_pause: bool = False,
    tree_sizes: Mapping[int, Sequence[int]] | None = None,
) -> RoundExecutor:
    """forced_length: accepted length to force on every round, for measuring speed. Others as to
    RoundExecutor."""
    table, device = runner.pools.req_to_token_pool.req_to_token, runner.device
    (num_rows, context), largest = table.shape, max(batch_sizes)
    source, steps = drafted.source, sorted(set(drafted.steps))
    state = RoundState.of(num_rows, largest, steps[-1], device)
    layout: Layout = Chain(steps, largest, device)
    if source.is_tree:
        sizes = set[int]().union(*(source.tree_sizes(one) for one in steps if one))
        layout = Branching(sizes, largest, device)
    judges, judges_greedy = rule is not None, rule is not None and rule.greedy_too
    vocab_size = runner.model.vocab_size
    sampling = SamplingState(num_rows, context, vocab_size, device, judges, judges_greedy)
    commit = Commit(state, context, Simulated.of(forced_length))
    round = Round(runner, commit, source, layout, rule, sampling)
    return RoundExecutor(round, steps, batch_sizes, padding, may_pause, tree_sizes)


def make_rule(verifier: Verifier, drafter: Drafter) -> Rule | None:
    """None: drafts are matched. Raises HostRoundsError where rounds on the device cannot decide as
    the verifier does: it declares no device_rule, or lacks what the one it declares asks for."""
    declared = verifier.device_rule
    if declared == "relaxed" and isinstance(verifier, RelaxedVerifier):
        return Relaxed(verifier)
    if declared == "stochastic" and isinstance(verifier, StochasticVerifier):
        if not verifier.has_keyed_numbers():
            raise HostRoundsError(fallbacks.OWN_NUMBERS)
        # Without probabilities of drafts the rule has nothing to compare, and matches.
        if drafter.emits_probs or not verifier.needs_draft_probs:
            return Stochastic(verifier)
    elif declared != "match":
        raise HostRoundsError(fallbacks.VERIFIER_COMPARES_MORE)
    if drafter.emits_probs:
        raise HostRoundsError(fallbacks.UNWEIGHED_DRAFTS)
    return None


def drafted_by(drafter: Drafter, batch_size: int, device: torch.device, chooses: bool) -> DraftedBy:
    """batch_size: of the largest round. chooses: as to make_rounds. Raises HostRoundsError where
    the drafter needs the host in the middle of a round."""
    if drafter.drafts_on == "host":
        raise HostRoundsError(fallbacks.ROUND_NEEDS_HOST)
    if drafter.drafts_on == "lookup":
        lookup = make_lookup(drafter, drafter, batch_size, device)
        nodes_of = drafter.num_tree_nodes if drafter.proposes_tree else lookup.num_nodes
        return DraftedBy(lookup, lookup_steps(drafter.max_nodes, nodes_of))
    model = DeviceDraft(drafter.model_drafter)
    if drafter.lookup is None:
        return DraftedBy(model, model_steps(model.max_steps, chooses))
    hybrid = HybridDraft(model, make_lookup(drafter.lookup, drafter, batch_size, device), device)
    steps = hybrid_steps(hybrid.model_steps, drafter.max_nodes - 1, chooses)
    return DraftedBy(hybrid, steps)
