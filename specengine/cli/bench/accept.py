"""Measure how much of what drafters propose is accepted, on the same prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from specengine.cli.args import add_config_arguments, add_model_argument, config_of
from specengine.cli.logs import set_up_logging
from specengine.core.errors import ConfigError

if TYPE_CHECKING:
    from specengine.lab.accept.run import Plan
    from specengine.lab.accept.settings import Setting

# Options of the server, and those that the bench sets itself.
WITHOUT = (
    "served_model_name",
    "max_queued_requests",
    "host",
    "port",
    "api_key",
    "disable_radix_cache",
    "enable_mixed_chunk",
    "max_running_requests",
    "trace",
    "trace_every_position",
    "trace_max_mb",
    "tp_size",
    "draft_tp_size",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    _add_subjects(parser.add_argument_group("what is measured"))
    _add_effort(parser.add_argument_group("effort"))
    group = parser.add_argument_group("results")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="write DATE-NAME.json, .md and plots (.png) there"
    )
    group.add_argument(
        "--name", default="acceptance", help="name of the files in --out (default: %(default)s)"
    )
    add_config_arguments(parser, without=WITHOUT)


def _add_subjects(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompts",
        nargs="+",
        action="extend",
        metavar="SET",
        help="names of prompt sets, or JSONL files with `turns`; default: mt_bench",
    )
    group.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where named sets lie; default: SPECENGINE_DATA_DIR, or ./data",
    )
    group.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="TEXT",
        help="a way to speculate, such as 'chain of 5: algorithm=EAGLE3 draft_model_path=DIR "
        "num_steps=5'; what is left out is as the --speculative-* flags say; may be repeated",
    )
    group.add_argument(
        "--settings", type=Path, metavar="FILE", help="YAML file of settings: names and options"
    )
    group.add_argument(
        "--temperature",
        nargs="+",
        type=float,
        default=[0.0],
        metavar="X",
        help="one or several; 0 is greedy (default: 0)",
    )


def _add_effort(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--limit", type=int, metavar="N", help="prompts of each set; default: all")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="most tokens of an answer (default: %(default)s)",
    )
    group.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="requests at once, which changes no result; default: 64 on a GPU, 8 on CPU",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of sampling and bootstrap (default: 0)"
    )
    group.add_argument(
        "--speed", action="store_true", help="also time each setting beside plain decoding"
    )
    group.add_argument(
        "--speed-batch-size",
        type=int,
        default=1,
        metavar="N",
        help="requests at once when timing (default: %(default)s)",
    )
    group.add_argument(
        "--speed-repeats",
        type=int,
        default=3,
        metavar="N",
        help="timings of each, after one to warm up (default: %(default)s)",
    )


def check_temperature(temperature: float) -> None:
    """Raises ConfigError."""
    if not temperature >= 0:
        raise ConfigError(f"--temperature {temperature:g}: must not be negative")


def run(args: argparse.Namespace) -> int:
    """0 where every setting was measured, else 1."""
    plan = plan_of(args)
    set_up_logging(plan.config.server.log_level)
    from specengine.cli.bench.accept_view import Display, show
    from specengine.lab.accept.output import Output
    from specengine.lab.accept.run import AcceptBench

    output = Output(args.json, args.out, args.name)
    output.check()
    with Display(output.write) as display:
        report = AcceptBench(plan, display).run()
    show(report)
    for path in output.finish(report):
        print(path)
    return 1 if any(setting.error for setting in report.settings) else 0


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises ConfigError, or DataError for prompts that cannot be read."""
    config = config_of(args)
    _check_effort(args)
    from specengine.engine.resolve import resolve_device
    from specengine.lab.accept.prompts import find_prompt_sets
    from specengine.lab.accept.run import Plan
    from specengine.lab.accept.speed import SpeedPlan

    sets = find_prompt_sets(args.prompts or ["mt_bench"], args.data_dir)
    on_gpu = resolve_device(config.model.device).type == "cuda"
    batch_size = args.batch_size or (64 if on_gpu else 8)
    speed = SpeedPlan(args.speed_batch_size, args.speed_repeats) if args.speed else None
    return Plan(
        config=config,
        settings=tuple(settings_of(args)),
        sets=tuple(one.limited(args.limit) for one in sets),
        temperatures=tuple(dict.fromkeys(args.temperature)),
        max_new_tokens=args.max_new_tokens,
        batch_size=max(batch_size, args.speed_batch_size if args.speed else 1),
        seed=args.seed,
        speed=speed,
    )


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Those of --settings, then those of each --setting; without either, the --speculative-* flags
    are the only one. Raises ConfigError."""
    from specengine.lab.accept.settings import Setting, check_names, parse_setting, read_settings

    base = config_of(args).spec
    settings = read_settings(args.settings, base) if args.settings is not None else []
    settings += [parse_setting(text, base) for text in args.setting]
    if not settings and base.algorithm is not None:
        settings = [Setting(base.algorithm, base)]
    check_names(settings)
    return settings


def _check_effort(args: argparse.Namespace) -> None:
    for name in ("limit", "max_new_tokens", "batch_size", "speed_batch_size", "speed_repeats"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.max_new_tokens < 2:
        raise ConfigError("--max-new-tokens 1: the prefill gives the first token; no round is left")
    check_temperature(min(args.temperature))
