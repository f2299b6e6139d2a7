"""Captures the device rounds of an engine, and measures what they cost."""

from __future__ import annotations

from specengine.core.config import EngineConfig
from specengine.core.parallel import Link
from specengine.engine.adaptive.cost_file import CostFile
from specengine.engine.adaptive.costs import ContextCost, Curve, RunningCosts, StepCosts
from specengine.engine.adaptive.estimate import HostSeconds
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.parts import EngineParts
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.timing import max_context, seconds_of

_CONTEXT = 2048  # tokens of a request, by which context costs are measured
_LEAST_CONTEXT = 128  # tokens; attention to fewer takes no time
_APART = 2  # one of so many batch sizes is measured so


def make_pipeline(
    config: EngineConfig, parts: EngineParts, rounds: RoundExecutor, costs: CostFile | None = None
) -> RoundPipeline:
    """Captures the rounds. costs: with all its facts."""
    wanted = rounds.batch_sizes
    rounds.capture()
    if rounds.batch_sizes != wanted and costs is not None and costs.by_hand is None:
        costs = None  # the file is of graphs that there was no memory for
    overlaps = not config.schedule.disable_overlap_schedule
    depths = None
    if parts.adaptive is not None:
        is_model, host = parts.drafter.drafts_on == "device", HostSeconds(overlaps)
        depths = _depths(rounds, is_model, costs, host, parts.link)
    return RoundPipeline(rounds, parts.drafter, parts.scheduler, depths, overlaps, parts.link)


def _depths(
    rounds: RoundExecutor, is_model: bool, costs: CostFile | None, host: HostSeconds, link: Link
) -> DepthChooser:
    """What rounds cost on the device is measured now, if there is no file of it; the time of the
    host, and of drafts that it makes, is learned from the rounds. Of several ranks the first alone
    has a file, and chooses; but rounds that are measured are rounds of all."""
    steps, by_hand = rounds.steps, None if costs is None else costs.by_hand
    (has_table,) = link.decide(lambda: (int(costs is not None and costs.table is not None),))
    if rounds.source.host_drafts:
        model_steps = rounds.source.model_steps if is_model else None
        if not has_table:
            learned = RunningCosts(_without_context(rounds))
            return DepthChooser(steps, learned, model_steps=model_steps, pads=True)
        depths = DepthChooser(steps, by_hand, model_steps=model_steps, pads=True)
        if costs is not None:
            costs.start(depths.costs)
        return depths
    sizes = rounds.smaller_trees(rounds.batch_sizes[-1])
    table = None
    if costs is not None:
        table = costs.read_or(lambda: _measure(rounds))
    elif not has_table:
        table = _measure(rounds)
    # A table written by hand holds as it is.
    return DepthChooser(steps, table, sizes=sizes, host=None if by_hand else host, pads=True)


def _measure(rounds: RoundExecutor) -> StepCosts:
    table = _without_context(rounds)
    cost = _context_cost(rounds, table)
    return StepCosts(table.seconds, table.smaller_trees, context_cost=cost)


def _without_context(rounds: RoundExecutor) -> StepCosts:
    seconds = {  # from large to small, as graphs are captured
        size: {k: seconds_of(rounds, size, k) for k in rounds.steps}
        for size in reversed(rounds.batch_sizes)
    }
    return StepCosts(seconds, _smaller_trees(rounds))


def _context_cost(rounds: RoundExecutor, table: StepCosts) -> ContextCost | None:
    """Measured at a few batch sizes, the largest first and the smallest last."""
    context = min(_CONTEXT, max_context(rounds))
    sizes = [size for size in rounds.batch_sizes if size < len(rounds.table)]
    if context < _LEAST_CONTEXT or not sizes:
        return None
    more: dict[int, Curve] = {}
    for size in sorted({sizes[0], *sizes[::-_APART]}, reverse=True):
        took = {k: seconds_of(rounds, size, k, context=context) for k in rounds.steps}
        more[size] = {k: max(one - table.seconds[size][k], 0.0) for k, one in took.items()}
    return ContextCost(context, dict(sorted(more.items())))


def _smaller_trees(rounds: RoundExecutor) -> dict[int, dict[int, Curve]]:
    """Seconds by nodes, batch size and num_steps."""
    seconds: dict[int, dict[int, Curve]] = {}
    for batch_size in reversed(rounds.batch_sizes):
        for steps, sizes in rounds.smaller_trees(batch_size).items():
            for size in sizes:
                curve = seconds.setdefault(size, {}).setdefault(batch_size, {})
                curve[steps] = seconds_of(rounds, batch_size, steps, size)
    return seconds
