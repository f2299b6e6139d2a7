"""Prove that speculation leaves a model's output as it is."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specengine.cli.args import add_config_arguments, config_of
from specengine.cli.logs import set_up_logging
from specengine.core.config import EngineConfig, ModelConfig

if TYPE_CHECKING:
    from specengine.engine.proof.check import Check
    from specengine.engine.proof.subjects import Subject

# Options of the server, and those that the proof sets itself.
WITHOUT = (
    "served_model_name",
    "max_queued_requests",
    "host",
    "port",
    "api_key",
    "log_level",
    "trace",
    "trace_every_position",
    "trace_max_mb",
    "page_size",
    "disable_radix_cache",
    "chunked_prefill_size",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="what to run; default: a tiny random model made on the spot",
    )
    group = parser.add_argument_group("proof")
    group.add_argument("--quick", action="store_true", help="a part of it, in a minute or two")
    group.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_config_arguments(parser, without=WITHOUT)


def run(args: argparse.Namespace) -> int:
    """0 where every check holds, else 1."""
    config = config_of(args)
    set_up_logging("warning")
    from specengine.engine.proof.suite import FULL, QUICK, verify

    with models(config, args.model) as (config, subjects):
        checks = watch(verify(config, subjects, QUICK if args.quick else FULL))
    passed = all(check.passed for check in checks)
    if args.json:
        rows = [{**asdict(check), "passed": check.passed} for check in checks]
        print(json.dumps({"passed": passed, "checks": rows}, indent=1))
    else:
        show(checks)
    return 0 if passed else 1


@contextmanager
def models(config: EngineConfig, model: str | None) -> Iterator[tuple[EngineConfig, list[Subject]]]:
    """The configuration with a model, and what is proved: the algorithm that was asked for, or all
    that can be had."""
    from specengine.engine.proof.subjects import Subject
    from specengine.engine.proof.suite import default_subjects
    from specengine.engine.proof.tiny_model import save_tiny_model

    spec = config.spec
    asked = [Subject(spec.algorithm, spec)] if spec.algorithm is not None else None
    if model is not None or config.model.model != ModelConfig().model:
        yield config, asked or default_subjects()
        return
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder, "tiny"), Path(folder, "tiny-draft")
        save_tiny_model(target, seed=0)
        save_tiny_model(draft, seed=1)
        tiny = replace(config, model=replace(config.model, model=str(target)))
        yield tiny, asked or default_subjects(str(draft))


def watch(checks: Iterator[Check]) -> list[Check]:
    """All of them, with a line on stderr that says how far it is."""
    from rich.console import Console

    done: list[Check] = []
    with Console(stderr=True).status("proving") as status:
        for check in checks:
            done.append(check)
            failed = sum(not one.passed for one in done)
            status.update(f"{len(done)} checks, {failed} failed; {check.check}: {check.subject}")
    return done


def show(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    caption = "enumeration: largest error of a joint probability; χ²: p-value"
    table = Table("check", "subject", "measured", "wanted", "", "note", caption=caption)
    for check in checks:
        table.add_row(
            check.check,
            check.subject,
            f"{check.statistic:.3g}",
            f"{check.sense} {check.threshold:g}",
            "[green]holds[/]" if check.passed else "[bold red]FAILS[/]",
            check.note,
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)
    failed = sum(not check.passed for check in checks)
    console.print(f"{len(checks) - failed} of {len(checks)} checks hold")
