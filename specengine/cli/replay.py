"""Tell from a trace what other settings would have accepted."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specengine.draft.trace.reader import Trace
    from specengine.lab.accept.bootstrap import Estimate
    from specengine.lab.replay.estimate import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="what `--trace FILE` recorded")
    group = parser.add_argument_group("settings; by default all that the trace knows")
    for name, text in (
        ("num-steps", "depths of the draft loop"),
        ("topk", "branches a token"),
        ("num-draft-tokens", "nodes sent to verification, root included"),
        ("vocab-sizes", "sizes of the drafter's vocabulary, its most frequent tokens"),
    ):
        group.add_argument(f"--{name}", type=_numbers, default=[], metavar="N,N", help=text)
    group.add_argument(
        "--verify", type=_names, default=[], metavar="NAME,NAME", help="rules of acceptance"
    )
    group.add_argument(
        "--vocabulary",
        type=Path,
        metavar="FILE",
        help=".npy of token ids, the most frequent first; default: as frequent as in the outputs "
        "of the trace's other requests",
    )
    group = parser.add_argument_group("results")
    group.add_argument("--cost-table", type=Path, metavar="FILE", help="JSON of step costs, in ms")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the bootstrap")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    group.add_argument("--plot", type=Path, metavar="FILE", help="write the Pareto plot (.png)")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from specengine.draft.replay.settings import Recorded, grid
    from specengine.draft.trace.reader import Trace
    from specengine.lab.replay.cost import CostTable
    from specengine.lab.replay.estimate import replay
    from specengine.lab.replay.report import as_json, check_matplotlib, draw_pareto

    if args.plot is not None:
        check_matplotlib()
    trace = Trace.read(args.trace)
    settings = grid(
        Recorded.of(trace.header),
        args.num_steps,
        args.topk,
        args.num_draft_tokens,
        args.verify,
        [None, *args.vocab_sizes],
    )
    costs = None if args.cost_table is None else CostTable.read(args.cost_table)
    with Console(stderr=True).status("replaying") as status:
        rows = replay(
            trace,
            settings,
            costs,
            args.vocabulary,
            args.seed,
            lambda setting: status.update(f"replayed {setting}"),
        )
    show(trace, rows)
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(trace, rows), indent=1))
    if args.plot is not None:
        draw_pareto(trace, rows, args.plot)
    return 0


def show(trace: Trace, rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    from specengine.lab.replay.report import DEFINITION

    table = Table(caption=DEFINITION, caption_justify="left")
    for column in ("steps", "topk", "nodes", "verify", "vocabulary", "τ", "95%", "unknown", ""):
        table.add_column(column, justify="right")
    has_costs = rows[0].speed is not None
    for column in ("ms a round", "tok/s", "speedup", "95%") if has_costs else ():
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*_cells(row), style="bold" if row.is_best else None)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)
    console.print(
        "bold: no setting has a higher τ at the same price. exact: what a run of the same prompts "
        "would have shown; estimate: see docs/laboratory/trace_format.md. unknown: rounds in which "
        "the trace holds less than the setting would have drafted."
    )
    if trace.is_full or trace.is_cut:
        why = "reached --trace-max-mb" if trace.is_full else "ends in the middle of a round"
        console.print(f"[yellow]the trace {why}: what came after is not in these numbers[/]")


def _cells(row: Row) -> list[str]:
    setting, speed = row.setting, row.speed
    cells = [
        "" if setting.num_steps is None else str(setting.num_steps),
        str(setting.topk),
        str(setting.num_draft_tokens),
        setting.verify,
        "all" if setting.vocabulary is None else str(setting.vocabulary),
        f"{row.tau.value:.3f}",
        _interval(row.tau),
        f"{row.unknown:.1%}",
        "exact" if row.is_exact else "estimate",
    ]
    if speed is not None:
        cells += [f"{speed.round_ms:.2f}", f"{speed.tokens_per_second:.0f}"]
        cells += [f"{speed.speedup.value:.2f}", _interval(speed.speedup)]
    return cells


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.2f}–{estimate.high:.2f}"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")
