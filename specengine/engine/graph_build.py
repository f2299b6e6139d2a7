"""Decides whether whole rounds can run on the device, and prepares the graphs of those that can."""

from __future__ import annotations

from typing import Any

import torch

from specengine.core.config import EngineConfig
from specengine.core.spec import (
    Drafter,
    RowDrafter,
    SleepyRowDrafter,
    TextDrafter,
    TextTreeDrafter,
    TreeRowDrafter,
)
from specengine.core.weighed_trees import WeighedTreeDrafter
from specengine.draft.hybrid import HybridDrafter
from specengine.engine.adaptive.cost_file import CostFile
from specengine.engine.adaptive.costs import ContextCost, Curve, RunningCosts, StepCosts
from specengine.engine.adaptive.estimate import HostSeconds, smaller_sizes
from specengine.engine.adaptive.state import AdaptiveSteps
from specengine.engine.flights import Flights
from specengine.engine.graph_hybrid import GraphHybridRound, GraphHybridTreeRound
from specengine.engine.graph_relaxed import GraphRelaxedRound, GraphRelaxedTreeRound
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_tree import GraphTreeRound
from specengine.engine.graph_weighed import GraphWeighedRound, WeighingRound
from specengine.engine.graph_weighed_hybrid import (
    GraphRelaxedHybridRound,
    GraphRelaxedHybridTreeRound,
    GraphWeighedHybridRound,
    GraphWeighedHybridTreeRound,
)
from specengine.engine.graph_weighed_tree import GraphWeighedTreeRound
from specengine.engine.grounds import TRACED
from specengine.engine.host_drafts import HostDrafter, HostDrafts
from specengine.engine.host_trees import HostTrees
from specengine.engine.hybrid_drafts import HybridDrafts, MixedDrafts
from specengine.engine.hybrid_trees import HybridTrees
from specengine.engine.loop import EngineParts
from specengine.engine.round_seconds import most_text
from specengine.runner.graph_counters import PLANS_ON_HOST
from specengine.target.verify.relaxed import RelaxedVerifier
from specengine.target.verify.sampled import SampledVerifier

Weigher = SampledVerifier | RelaxedVerifier  # whose tokens follow from the drafts

# By whether text stands beside a model, and whether drafts branch.
_WEIGHED: dict[tuple[bool, bool], type[WeighingRound]] = {
    (False, False): GraphWeighedRound,
    (False, True): GraphWeighedTreeRound,
    (True, False): GraphWeighedHybridRound,
    (True, True): GraphWeighedHybridTreeRound,
}
_RELAXED: dict[tuple[bool, bool], type[WeighingRound]] = {
    (False, False): GraphRelaxedRound,
    (False, True): GraphRelaxedTreeRound,
    (True, False): GraphRelaxedHybridRound,
    (True, True): GraphRelaxedHybridTreeRound,
}

_SHALLOW = (0, 1, 2, 3)  # depths to choose from beside the deepest
_TEXT = 2048  # tokens of a request, by which is measured what it takes to read them
_LEAST_TEXT = 128  # likewise; less takes no time
_APART = 2  # of the batch sizes that are measured so, each of so many
_BETWEEN = 3  # of drafts from the host, beside the deepest and none


def make_flights(
    config: EngineConfig, parts: EngineParts, graph_round: GraphRound, costs: CostFile | None = None
) -> Flights:
    """Captures what lets rounds run on the device alone. costs: settled."""
    wanted = graph_round.batch_sizes
    graph_round.capture()
    if graph_round.batch_sizes != wanted and costs is not None and costs.by_hand is None:
        costs = None  # the file speaks of graphs that there was no memory for
    overlaps = not config.schedule.disable_overlap_schedule
    depths = None if parts.adaptive is None else _depths(graph_round, costs, HostSeconds(overlaps))
    return Flights(graph_round, parts.drafter, parts.scheduler, depths, overlaps)


def _depths(graph_round: GraphRound, costs: CostFile | None, host: HostSeconds) -> AdaptiveSteps:
    """What rounds cost on the device is measured now, if no file tells; the time of the host, and
    of drafts that it makes, is learned from the rounds."""
    steps, by_hand = graph_round.steps, None if costs is None else costs.by_hand
    drafter = graph_round.drafter
    if isinstance(drafter, HostDrafter):
        of_model = drafter.model_steps if isinstance(drafter, MixedDrafts) else None
        if costs is None or not costs.has_table:
            learned = RunningCosts(_of_no_text(graph_round))
            return AdaptiveSteps(steps, learned, model_steps=of_model, pads=True)
        depths = AdaptiveSteps(steps, by_hand, model_steps=of_model, pads=True)
        costs.start(depths.costs)
        return depths
    sizes = graph_round.smaller_trees(graph_round.batch_sizes[-1])
    table = _measure(graph_round) if costs is None else costs.read_or(lambda: _measure(graph_round))
    # A table written by hand holds as it is.
    return AdaptiveSteps(steps, table, sizes=sizes, host=None if by_hand else host, pads=True)


def _measure(graph_round: GraphRound) -> StepCosts:
    table = _of_no_text(graph_round)
    return StepCosts(
        table.seconds, table.smaller_trees, context_cost=_context_cost(graph_round, table)
    )


def _of_no_text(graph_round: GraphRound) -> StepCosts:
    seconds = {  # from large to small, as graphs are captured
        size: {k: graph_round.seconds_of(size, k) for k in graph_round.steps}
        for size in reversed(graph_round.batch_sizes)
    }
    return StepCosts(seconds, _smaller_trees(graph_round))


def _context_cost(graph_round: GraphRound, table: StepCosts) -> ContextCost | None:
    """Of a few batch sizes, the largest first and the smallest last."""
    text = min(_TEXT, most_text(graph_round))
    sizes = [size for size in graph_round.batch_sizes if size < len(graph_round.table)]
    if text < _LEAST_TEXT or not sizes:
        return None
    more: dict[int, Curve] = {}
    for size in sorted({sizes[0], *sizes[::-_APART]}, reverse=True):
        took = {k: graph_round.seconds_of(size, k, text=text) for k in graph_round.steps}
        more[size] = {k: max(one - table.seconds[size][k], 0.0) for k, one in took.items()}
    return ContextCost(text, dict(sorted(more.items())))


def _smaller_trees(graph_round: GraphRound) -> dict[int, dict[int, Curve]]:
    """Seconds by nodes, batch size and num_steps."""
    seconds: dict[int, dict[int, Curve]] = {}
    for batch_size in reversed(graph_round.batch_sizes):
        for steps, sizes in graph_round.smaller_trees(batch_size).items():
            for size in sizes:
                curve = seconds.setdefault(size, {}).setdefault(batch_size, {})
                curve[steps] = graph_round.seconds_of(batch_size, steps, size)
    return seconds


def make_graph_round(config: EngineConfig, parts: EngineParts) -> GraphRound | str:
    """Not captured yet; or why there is none. For an engine with graphs."""
    sizes, forced = config.graph.cuda_graph_bs, config.spec.simulate_accept_length
    assert sizes is not None
    if parts.worker.runner.attn_backend.limits.plans_on_host:
        return PLANS_ON_HOST
    if config.trace.trace is not None:
        return TRACED
    chooses = parts.adaptive is not None
    found = _row_drafter(parts.drafter, max(sizes), parts.worker.runner.device, chooses)
    if found is None:
        return "the drafter needs the host in the middle of a round"
    rule = weigher(parts)
    if getattr(parts.verifier, "is_lossy", True) and forced is None and rule is None:
        return "the verifier does more than compare tokens"
    if parts.drafter.emits_probs and rule is None:
        return "drafts are sampled, and the verifier does not weigh them"
    padding = not config.graph.disable_cuda_graph_padding
    drafter, steps = found
    unseen = parts.worker.runner.attn_backend.limits.first_keys  # what it slept through
    may_sleep = chooses and unseen and isinstance(drafter, SleepyRowDrafter)
    given = steps, list(sizes), padding, forced, may_sleep
    graph_round = new_round(parts, drafter, *given)
    may_cut = chooses and not isinstance(drafter, HostDrafter)
    if isinstance(graph_round, GraphTreeRound) and may_cut:
        graph_round.sizes = smaller_sizes(steps, graph_round.drafter.num_tree_nodes)
    return graph_round


def new_round(parts: EngineParts, drafter: RowDrafter, *given: Any) -> GraphRound:
    """Of the kind that its drafts and their verifier ask for. given: as to GraphRound."""
    rule = weigher(parts)
    if rule is not None:
        return _weighing_round(rule, parts, drafter, *given)
    of_chains, of_trees = GraphRound, GraphTreeRound
    if isinstance(drafter, MixedDrafts):
        of_chains, of_trees = GraphHybridRound, GraphHybridTreeRound
    kind = of_chains if _tree_steps(drafter) is None else of_trees
    graph_round = kind(parts.worker, drafter, *given)
    graph_round.samples = not getattr(parts.verifier, "follows_drafts", True) or _matches(parts)
    return graph_round


def _weighing_round(rule: Weigher, parts: EngineParts, *given: Any) -> WeighingRound:
    """given: as to GraphRound, from the drafter on."""
    is_tree, more = parts.drafter.proposes_tree, (parts.drafter.emits_probs, parts.worker, *given)
    kinds = _RELAXED if isinstance(rule, RelaxedVerifier) else _WEIGHED
    return kinds[isinstance(given[0], MixedDrafts), is_tree](rule, *more)


def weigher(parts: EngineParts) -> Weigher | None:
    """The rule for what the engine's drafter drafts, if it weighs that and a graph can hold it."""
    verifier, drafter = parts.verifier, parts.drafter
    if not isinstance(verifier, Weigher) or _matches(parts):
        return None
    if drafter.proposes_tree and not isinstance(drafter, WeighedTreeDrafter | TextTreeDrafter):
        return None
    if isinstance(verifier, RelaxedVerifier):
        return verifier
    return verifier if verifier.kernel is not None and verifier.has_keyed_numbers() else None


def _matches(parts: EngineParts) -> bool:
    """Whether a verifier that could weigh drafts has none to weigh, and so matches them."""
    verifier = parts.verifier
    if not isinstance(verifier, SampledVerifier):
        return False
    return verifier.needs_draft_probs and not parts.drafter.emits_probs


def _row_drafter(
    drafter: Drafter, batch_size: int, device: torch.device, chooses: bool
) -> tuple[RowDrafter, list[int]] | None:
    """Who drafts in graphs, and how deep. chooses: between depths, none among them."""
    is_of_text = isinstance(drafter, TextDrafter) and drafter.reads_text_alone
    if is_of_text and not drafter.proposes_tree:
        most = drafter.max_nodes - 1
        steps = [0, *(n for n in (_BETWEEN,) if n < most), most]
        return HostDrafts(batch_size, most, device), steps
    if isinstance(drafter, TextTreeDrafter) and drafter.reads_text_alone:
        trees = HostTrees(batch_size, drafter.max_nodes, drafter.most_nodes, device)
        # Of as many nodes as the deepest, rounds would cost as much.
        between = drafter.most_nodes(_BETWEEN) < drafter.max_nodes
        return trees, [0, *([_BETWEEN] if between else []), trees.tree_row_steps]
    if isinstance(drafter, HybridDrafter):
        return _hybrid_drafts(drafter, batch_size, device, chooses)
    if not isinstance(drafter, RowDrafter) or (deepest := _deepest(drafter)) is None:
        return None
    shallower = [n for n in _SHALLOW if n < deepest] if chooses else []
    return drafter, [*shallower, deepest]


def _tree_steps(drafter: Drafter | RowDrafter) -> int | None:
    return drafter.tree_row_steps if isinstance(drafter, TreeRowDrafter) else None


def _deepest(drafter: RowDrafter) -> int | None:
    """Levels of its drafts, whether they branch or not."""
    tree_steps = _tree_steps(drafter)
    return drafter.row_steps if tree_steps is None else tree_steps


def _hybrid_drafts(
    drafter: HybridDrafter, batch_size: int, device: torch.device, chooses: bool
) -> tuple[RowDrafter, list[int]] | None:
    """As _row_drafter, of a model's drafts beside those of text."""
    inner, most = drafter.inner, drafter.max_nodes - 1
    if not isinstance(inner, RowDrafter) or _deepest(inner) is None:
        return None
    kind = HybridTrees if drafter.proposes_tree else HybridDrafts
    drafts = kind(inner, drafter.suffix, batch_size, most, device)
    own = drafts.model_steps
    shallower = [n for n in _SHALLOW if n < own] if chooses else []
    return drafts, sorted({*shallower, own, most})
