"""What came of a replay: JSON, and the Pareto plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specengine.core.errors import ConfigError
from specengine.draft.replay.settings import ReplaySetting
from specengine.draft.trace.reader import Trace
from specengine.lab.replay.estimate import Row, price

DEFINITION = (
    "tau: tokens emitted a round, the bonus token included = 1 + accepted / rounds, over all "
    "requests of the trace; intervals: 95%, bootstrap over requests"
)


def as_json(trace: Trace, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "definition": DEFINITION,
        "trace": trace.header | {"requests": len(trace.requests), "is_cut": trace.is_cut},
        "is_full": trace.is_full,
        "rows": [_without_nan(asdict(row)) for row in rows],
    }


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: null is what could not be estimated."""
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def label(setting: ReplaySetting) -> str:
    """Short, for the plot."""
    parts = [] if setting.num_steps is None else [f"{setting.num_steps} steps"]
    parts += [f"topk {setting.topk}"] if setting.topk > 1 else []
    parts += [f"{setting.num_draft_tokens} nodes"]
    parts += [] if setting.vocabulary is None else [f"{setting.vocabulary} tokens"]
    return ", ".join(parts)


def check_matplotlib() -> None:
    """Raises ConfigError where it is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot draws with matplotlib, which is not installed: pip install 'specengine[bench]'"
        )


def draw_pareto(trace: Trace, rows: Sequence[Row], path: Path) -> None:
    """Accepted length over the price of a round; the settings that no other one beats are joined.
    Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    for rule in sorted({row.setting.verify for row in rows}):
        of_rule = [row for row in rows if row.setting.verify == rule]
        values = [row.tau.value for row in of_rule]
        below = [row.tau.value - row.tau.low for row in of_rule]
        above = [row.tau.high - row.tau.value for row in of_rule]
        prices = [price(row) for row in of_rule]
        axes.errorbar(prices, values, yerr=[below, above], fmt="o", ms=4, alpha=0.6, label=rule)
    best = sorted((row for row in rows if row.is_best), key=price)
    axes.plot([price(row) for row in best], [row.tau.value for row in best], "k--", lw=0.8)
    for row in best:
        place = (price(row), row.tau.value)
        axes.annotate(
            label(row.setting), place, fontsize=6, xytext=(4, -8), textcoords="offset points"
        )
    has_costs = rows[0].speed is not None
    axes.set_xlabel("time of a round, ms" if has_costs else "nodes verified a round, root included")
    axes.set_ylabel("accepted length τ: tokens emitted a round, bonus included")
    axes.set_title(
        f"{trace.header['model']} with {trace.header['algorithm']}, replayed from a trace of "
        f"{len(trace.requests)} requests; bars: 95% bootstrap interval over requests",
        fontsize=8,
    )
    axes.grid(alpha=0.3)
    axes.legend(title="verifier", fontsize=8)
    figure.savefig(path)
