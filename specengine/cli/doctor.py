"""Find out why a drafter's tokens are hardly ever accepted."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from specengine.cli.args import add_config_arguments, config_of
from specengine.cli.logs import set_up_logging

if TYPE_CHECKING:
    from specengine.lab.doctor.report import Diagnosis
    from specengine.lab.doctor.scores import Score
    from specengine.lab.doctor.search import Finding

# Options of the server and of traces, and those of drafting that an examination does not depend on.
WITHOUT = (
    "served_model_name",
    "log_level",
    "max_queued_requests",
    "enable_mixed_chunk",
    "speculative_draft_model_path",
    "trace",
    "trace_every_position",
    "trace_max_mb",
    "tp_size",
    "draft_tp_size",
)
_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="TARGET", help="the model that is drafted for")
    parser.add_argument(
        "speculative_draft_model_path",
        nargs="?",
        metavar="DRAFT",
        help="the drafter: a directory, hub id or built-in name; default: the target's own MTP "
        "layers",
    )
    group = parser.add_argument_group("examination")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON lines with `turns`, by path or name; default: a few of its own",
    )
    group.add_argument("--new-tokens", type=int, default=48, metavar="N", help="of each answer")
    group.add_argument(
        "--no-reference",
        action="store_true",
        help="do not compare features with those that transformers computes",
    )
    group.add_argument(
        "--write-fixed", type=Path, metavar="DIR", help="write the drafter as it should be"
    )
    group.add_argument("--all", action="store_true", help="show everything that was tried")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_arguments(parser, without=WITHOUT)


def run(args: argparse.Namespace) -> int:
    """0 where the drafter is healthy, 1 where a cause was found, 2 where none was."""
    config = config_of(args)
    set_up_logging("warning")
    from rich.console import Console

    from specengine.lab.doctor.diagnose import Examination, diagnose
    from specengine.lab.doctor.prompts import prompts_of
    from specengine.lab.doctor.report import EXIT_CODES

    examination = Examination(
        config,
        prompts_of(args.prompts),
        args.new_tokens,
        with_reference=not args.no_reference,
        fixed=args.write_fixed,
    )
    with Console(stderr=True).status("examining") as status:
        diagnosis = diagnose(examination, lambda what: status.update(f"trying: {what}"))
    if args.json:
        print(diagnosis.to_json())
    else:
        show(diagnosis, None if args.all else _SHOWN)
    return EXIT_CODES[diagnosis.status]


def show(diagnosis: Diagnosis, most: int | None) -> None:
    """most: rows of the table; None is all."""
    from rich.console import Console
    from rich.table import Table

    from specengine.lab.doctor.draft_rows import LEVELS
    from specengine.lab.doctor.scores import LEVEL

    caption = (
        "first: share of first drafted tokens accepted. τ: tokens a round of a chain of "
        f"{LEVELS} emits, the bonus token included, on average over the places of "
        f"{diagnosis.num_texts} texts. Gain: in τ, with its {LEVEL:.1%} interval over texts."
    )
    table = Table("kind", "hypothesis", "first", "τ", "gain", caption=caption)
    if diagnosis.before is not None:
        table.add_row("", "as configured", *_scores(diagnosis.before), "")
    for finding in sorted(diagnosis.tried, key=_worth)[:most]:
        is_cause = finding in diagnosis.causes
        style = "bold green" if is_cause else None
        table.add_row(finding.suspect, finding.claim, *_row(finding), style=style)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for line in diagnosis.form:
        console.print(line, markup=False)
    console.print(table)
    for line in diagnosis.not_judged:
        console.print(f"not judged: {line}", markup=False)
    for check in diagnosis.checks:
        mark = "[green]holds[/]" if check.holds else "[bold red]FAILS[/]"
        console.print(f"{mark} {check.name}: {check.measured}")
    for line in diagnosis.verdict:
        console.print(line, markup=False)


def _worth(finding: Finding) -> float:
    """Smallest first."""
    if finding.after is None:
        return 1.0
    return -finding.after.tau.value if finding.gain is None else -finding.gain.tau.value


def _row(finding: Finding) -> list[str]:
    if finding.after is None:
        return ["", "", "refused"]
    gain = finding.gain
    if gain is None:
        return [*_scores(finding.after), ""]
    before = finding.before
    assert before is not None
    return [
        f"{before.first.value:.1%} → {finding.after.first.value:.1%}",
        f"{before.tau.value:.2f} → {finding.after.tau.value:.2f}",
        f"{gain.tau.value:+.2f} ({gain.tau.low:+.2f} to {gain.tau.high:+.2f})",
    ]


def _scores(score: Score) -> list[str]:
    first, tau = score.first, score.tau
    return [
        f"{first.value:.1%} ({first.low:.0%} to {first.high:.0%})",
        f"{tau.value:.2f} ({tau.low:.2f} to {tau.high:.2f})",
    ]
