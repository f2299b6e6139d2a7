"""Prove that speculation leaves a model's output as it is."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specengine.cli.args import add_config_arguments, config_of
from specengine.cli.logs import set_up_logging
from specengine.core.config import EngineConfig, ModelConfig
from specengine.core.config_sources import shown
from specengine.core.errors import ConfigError

if TYPE_CHECKING:
    from specengine.engine.proof.check import Check
    from specengine.engine.proof.record import ProofRecord
    from specengine.engine.proof.subjects import Subject
    from specengine.engine.proof.suite import Section

# Options of the server, and those that the proof sets itself.
WITHOUT = (
    "served_model_name",
    "max_queued_requests",
    "log_level",
    "trace",
    "trace_every_position",
    "trace_max_mb",
    "tp_size",
    "draft_tp_size",
    "page_size",
    "disable_radix_cache",
    "chunked_prefill_size",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="what to run; default: a tiny random Llama and drafts, made on the spot",
    )
    group = parser.add_argument_group("proof")
    group.add_argument("--quick", action="store_true", help="a part of it, in some minutes")
    group.add_argument("--json", action="store_true", help="print one JSON object at the end")
    group.add_argument(
        "--record",
        metavar="FILE",
        help="keep what is proved in this file; go on from there where it exists",
    )
    group.add_argument(
        "--part",
        metavar="I/N",
        default="1/1",
        help="every Nth section from the Ith on, to share the work between processes",
    )
    add_config_arguments(parser, without=WITHOUT)


def run(args: argparse.Namespace) -> int:
    """0 where every check holds, else 1."""
    config, part = config_of(args), parse_part(args.part)
    set_up_logging("error")  # useless drafts are part of the proof
    from specengine.engine.proof.suite import FULL, QUICK, sections, together

    plan = QUICK if args.quick else FULL
    record = open_record(args.record, args.model, config, plan.name, args.part)
    with models(config, args.model) as (config, subjects):
        chosen = list(sections(config, subjects, plan))[part]
        checks = [check for found in watch(chosen, record) for check in found]
    checks += together(checks)
    passed = all(check.passed for check in checks)
    if args.json:
        rows = [{**asdict(check), "passed": check.passed} for check in checks]
        print(json.dumps({"passed": passed, "checks": rows}, indent=1))
    else:
        from specengine.cli.verify_view import show

        show(checks)
    return 0 if passed else 1


def parse_part(text: str) -> slice:
    """Raises ConfigError."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"--part {text}: give two numbers such as 1/2, the first not the larger")
    return slice(int(index) - 1, None, int(count))


def open_record(
    path: str | None, model: str | None, config: EngineConfig, plan: str, part: str
) -> ProofRecord | None:
    """Raises ConfigError where the file is of another proof."""
    if path is None:
        return None
    from specengine.engine.proof.record import ProofRecord
    from specengine.lab.environment import environment

    about: dict[str, Any] = {"model": model, "plan": plan, "part": part, "config": shown(config)}
    return ProofRecord(Path(path), about, environment("specengine"))


@contextmanager
def models(config: EngineConfig, model: str | None) -> Iterator[tuple[EngineConfig, list[Subject]]]:
    """The configuration with a model, and what is proved: the algorithm that was asked for, or all
    that can be had."""
    from specengine.engine.factories import check_algorithm
    from specengine.engine.proof.catalogue import with_models, without_models
    from specengine.engine.proof.subjects import Subject
    from specengine.engine.proof.tiny_model import save_tiny_models
    from specengine.engine.spec_options import resolve_spec

    spec = config.spec
    if spec.algorithm is None:
        resolve_spec(replace(spec, verify="auto"))  # subjects have options of their own
    if model is not None or config.model.model != ModelConfig().model:
        asked = spec.algorithm is not None
        yield config, [Subject(str(spec.algorithm), spec)] if asked else without_models()
        return
    with tempfile.TemporaryDirectory() as folder:
        tiny = save_tiny_models(Path(folder))
        subjects = [*without_models(), *with_models(tiny)]
        if spec.algorithm is not None:
            draft = spec.draft_model_path or tiny.draft_of(check_algorithm(spec.algorithm))
            path = None if draft is None else str(draft)
            subjects = [Subject(spec.algorithm, replace(spec, draft_model_path=path))]
        yield replace(config, model=replace(config.model, model=str(tiny.target))), subjects


def watch(chosen: Iterable[Section], record: ProofRecord | None) -> Iterator[list[Check]]:
    """The checks of every section, as they are made or were recorded; a line on stderr says how
    far it is."""
    from rich.console import Console

    done: list[Check] = []
    with Console(stderr=True).status("proving") as status:
        for section in chosen:
            failed = sum(not one.passed for one in done)
            status.update(f"{len(done)} checks, {failed} failed; {section.name}")
            if record is None or section.name not in record.sections:
                checks = list(section.run())
                if record is not None:
                    record.add(section.name, checks)
            else:
                checks = record.sections[section.name]
            done += checks
            yield checks
