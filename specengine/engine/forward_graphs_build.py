"""Graphs of the forwards of rounds that no graph holds as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.drafter import Drafter
from specengine.core.forward_mode import ForwardMode
from specengine.core.model import DecoderModel
from specengine.draft.loop_graphs import DraftLoops, NoDraftLoops, can_loop
from specengine.draft.worker import DraftWorker
from specengine.engine.adaptive.estimate import smaller_sizes
from specengine.engine.factories import drafter_class, has_two_sources, keeps_logits, max_nodes
from specengine.engine.piecewise_build import piece_bytes
from specengine.engine.round.kinds import (
    Variants,
    hybrid_steps,
    hybrid_variants,
    lookup_steps,
    model_steps,
    round_keys,
)
from specengine.engine.round.sampling import PLAIN
from specengine.runner.fallbacks import (
    DRAFTER_NEEDS_HOST,
    PLANS_ON_HOST,
    SHARES_EXPERTS,
    TRACED,
)
from specengine.runner.forward_graphs.keys import (
    LARGE_MAX_WIDTH,
    MAX_TOKENS,
    GraphSizes,
)
from specengine.runner.forward_graphs.prefill import prefill_keys
from specengine.runner.forward_graphs.ragged import RaggedGraphs
from specengine.runner.memory.plan import GraphDemand
from specengine.runner.model_runner import ModelRunner

_PREFILLS = (64, 128, 256, 512, MAX_TOKENS)  # tokens
_LARGE_PREFILLS = (512, 1024, 1536, 2048)


def graph_bytes(config: EngineConfig, target: DecoderModel, bytes_per_token: int) -> int:
    """What the engine's graphs are expected to take. bytes_per_token: of a forward."""
    graph, spec = config.graph, config.spec
    pieces = piece_bytes(graph, target.num_layers, bytes_per_token)
    if graph.disable_cuda_graph or graph.cuda_graph_bs is None:
        return pieces
    prompts = () if graph.disable_cuda_graph_padding else prefill_keys(target)
    whole = GraphDemand(
        batch_sizes=graph.cuda_graph_bs,
        nodes=max_nodes(spec),
        depths=kinds_of_rounds(spec) * max(1, config.split.num_lanes),
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        bytes_per_token=bytes_per_token,
        prompts=tuple(key.tokens for key in prompts),
        kept_weights=_kept_weights(spec),
    )
    return pieces + whole.num_bytes


def _kept_weights(spec: SpecConfig) -> int:
    """Rows of weights that are kept beside each node's: one of its sampled draft; in trees also one
    of each expanded node. For a rule that keeps_logits the target's, sampled from out of place."""
    kept = int(keeps_logits(spec))
    if not spec.draft_sampling or spec.num_steps is None:
        return kept
    gone_on_with = 1 + (spec.num_steps - 1) * spec.eagle_topk
    return kept + (1 if spec.eagle_topk == 1 else 1 + -(-gone_on_with // spec.max_nodes))


def kinds_of_rounds(spec: SpecConfig) -> int:
    """Of whole rounds that a batch size has a graph for, at most: where depths are chosen, a tree
    is as large as it may be, and lookup's are no larger than chains. spec: resolved."""
    if spec.algorithm is None:
        return 1
    kind, chooses, most = drafter_class(spec.algorithm), spec.adaptive, spec.max_nodes - 1
    sizes: dict[int, list[int]] = {}
    variants: Variants = []
    own, may_pause = most if spec.num_steps is None else spec.num_steps, False
    if kind.drafts_on == "lookup":
        steps = lookup_steps(spec.max_nodes, lambda depth: 1 + depth)
    elif has_two_sources(spec):
        own = min(own, most)
        steps = hybrid_steps(own, most, chooses)
        variants = hybrid_variants(steps, own)
    else:
        steps, may_pause = model_steps(own, chooses), chooses and kind.can_pause
        if chooses and (spec.eagle_topk > 1 or kind.load_draft is None):
            sizes = smaller_sizes(steps, lambda _: spec.max_nodes)
    return len(round_keys(1, PLAIN, steps, sizes, may_pause, variants))


def add_ragged_graphs(
    config: EngineConfig, target: ModelRunner, drafts: Sequence[ModelRunner]
) -> dict[str, Counter[str]]:
    """Let verification, and what drafters run, be captured when it is first needed. Gives the
    counters of either kind; without graphs or without drafts there are none."""
    graph, spec = config.graph, config.spec
    if graph.disable_cuda_graph or graph.cuda_graph_bs is None or spec.algorithm is None:
        return {}
    if target.sharers is not None:  # ranks that capture meet, and here each would be alone
        return {}
    padding = not graph.disable_cuda_graph_padding
    counters: dict[str, Counter[str]] = {"verify": Counter(), "draft": Counter()}
    sizes = GraphSizes(graph.cuda_graph_bs, (max_nodes(spec),), padding)
    modes = frozenset([ForwardMode.TARGET_VERIFY])
    target.ragged_graphs = RaggedGraphs(target, "verify", modes, sizes, counters["verify"])
    context = target.pools.req_to_token_pool.req_to_token.shape[1]
    prefills = tuple(size for size in _PREFILLS if size <= context)  # padding has to fit, too
    large = _LARGE_PREFILLS if context >= LARGE_MAX_WIDTH else ()
    sizes = GraphSizes(graph.cuda_graph_bs, _draft_widths(spec), padding, prefills, large)
    modes = frozenset([ForwardMode.DECODE, ForwardMode.DRAFT_EXTEND])
    for draft in drafts:
        draft.ragged_graphs = RaggedGraphs(draft, "draft", modes, sizes, counters["draft"])
    return counters


def add_draft_loops(
    config: EngineConfig,
    drafter: Drafter,
    text_depends_on_drafts: bool = False,
    shares_experts: bool = False,
) -> dict[str, Counter[str]]:
    """Let a drafter that has a model draft in one graph, where neither it nor its attention needs
    the host. Gives the counters; without graphs or without a model there are none.
    text_depends_on_drafts: as to DraftLoops."""
    sizes = config.graph.cuda_graph_bs
    if (
        config.graph.disable_cuda_graph
        or sizes is None
        or not drafter.model_drafter.has_draft_loops
    ):
        return {}
    inner = cast(DraftWorker, drafter.model_drafter)
    inner.device_rounds = config.trace.trace is None
    reason = SHARES_EXPERTS if shares_experts else _why_no_loops(config, inner)
    if reason is not None:
        inner.loops = NoDraftLoops("draft loop", reason)
    else:
        padding = not config.graph.disable_cuda_graph_padding
        inner.loops = DraftLoops(inner, sizes, padding, Counter(), text_depends_on_drafts)
    return {"draft loop": inner.loops.counters}


def _why_no_loops(config: EngineConfig, drafter: DraftWorker) -> str | None:
    """Traced drafts must say how sure they are, which those of graphs do not."""
    if config.trace.trace is not None:
        return TRACED
    if not can_loop(drafter):
        return DRAFTER_NEEDS_HOST
    return PLANS_ON_HOST if drafter.runner.attn_backend.limits.plans_on_host else None


def _draft_widths(spec: SpecConfig) -> tuple[int, ...]:
    """A token of a chain, a level of a tree, what was accepted of own drafts, and of others'."""
    deepest = 1 if spec.num_steps is None else spec.num_steps + 1
    return tuple(sorted({1, spec.eagle_topk, deepest, max_nodes(spec)}))
