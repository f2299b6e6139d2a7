"""The counters of an engine, as /metrics, the dashboard and benchmarks read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.outputs import EngineStats, SplitStats
from specengine.engine.parts import EngineParts
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.split_prefill import SplitPrefills
from specengine.runner.fallbacks import GraphStats, NoGraphs


def engine_stats(
    parts: EngineParts,
    rounds: RoundExecutor | NoGraphs | None,
    ragged: Mapping[str, Counter[str]],
    choosers: Iterable[DepthChooser],
    split: SplitPrefills | None = None,
) -> EngineStats:
    """rounds: on the device, or why there are none. ragged: counters of the other graphs, by kind.
    choosers: of depths, those of rounds on the device first; the first that has chosen is
    reported."""
    scheduler, graphs = parts.scheduler, _graph_stats(parts, rounds, ragged)
    snapshots = scheduler.ledger.snapshots
    chosen = (one.current for one in choosers)
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_slots=scheduler.num_slots,
        num_free_slots=scheduler.num_free_slots,
        num_prompt_tokens=scheduler.num_prompt_tokens,
        num_cached_tokens=scheduler.num_cached_tokens,
        num_state_snapshots=None if snapshots is None else snapshots.num_kept,
        num_evicted_snapshots=0 if snapshots is None else snapshots.num_evicted,
        num_generated_tokens=scheduler.num_generated_tokens,
        num_retractions=scheduler.num_retractions,
        num_aborts=scheduler.lifecycle.num_aborts,
        num_graph_forwards=sum(one.replays for one in graphs.values()),
        num_eager_forwards=parts.worker.runner.num_eager,
        graphs=graphs,
        spec=scheduler.spec_totals,
        depth=next((one for one in chosen if one is not None), None),
        model_name=parts.model_name,
        algorithm=parts.config.spec.algorithm or "none",
        drafts_trees=parts.drafter.proposes_tree,
        split=None if split is None else _split_stats(split),
        layer_hooks=parts.worker.runner.hooks.patterns,
    )


def _split_stats(split: SplitPrefills) -> SplitStats:
    """May be called from any thread."""
    now, decision = dict(split.counters), split.decision
    return SplitStats(
        num_under_way=len(split.jobs),
        num_prefills=now.get("prefills", 0),
        num_prompts=now.get("prompts", 0),
        num_calls=now.get("calls", 0),
        num_turns=now.get("turns", 0),
        num_layers=now.get("layers", 0),
        num_left=now.get("left", 0),
        num_rounds_on_all=0 if split.lanes is None else split.lanes.num_on_all,
        fallbacks=GraphStats.of(split.counters).fallbacks,
        decision=decision,
    )


def _graph_stats(
    parts: EngineParts,
    rounds: RoundExecutor | NoGraphs | None,
    ragged: Mapping[str, Counter[str]],
) -> dict[str, GraphStats]:
    runner = parts.worker.runner
    kinds = {
        "decode": runner.decode_graphs,
        "prefill": runner.prefill_graphs,
        "piecewise": runner.pieces,
        "round": rounds,
    }
    counters = {kind: one.counters for kind, one in kinds.items() if one is not None}
    return {kind: GraphStats.of(one) for kind, one in (counters | dict(ragged)).items()}
