"""Measure output tokens a second, offline, by batch size."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specengine.cli.args import add_config_arguments, add_model_argument, config_of
from specengine.cli.bench.accept import WITHOUT as WITHOUT_IN_ACCEPT
from specengine.cli.bench.accept import check_temperature
from specengine.cli.logs import set_up_logging
from specengine.core.errors import ConfigError

if TYPE_CHECKING:
    from specengine.lab.throughput.plan import Plan

# Those that `bench accept` sets itself may be chosen here.
_RANKS = ("tp_size", "draft_tp_size")
_CHOSEN = ("disable_radix_cache", "enable_mixed_chunk", "max_running_requests", *_RANKS)
WITHOUT = tuple(name for name in WITHOUT_IN_ACCEPT if name not in _CHOSEN)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    _add_work(parser.add_argument_group("what is measured"))
    group = parser.add_argument_group("what it is measured against")
    add_bandwidth_argument(group)
    group.add_argument(
        "--peers",
        type=Path,
        metavar="FILE",
        help="YAML of what peers reach; default: benchmarks/peers/figures.yaml of the checkout",
    )
    add_output_arguments(parser.add_argument_group("results"), "throughput")
    add_config_arguments(parser, without=WITHOUT)


def add_temperature_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="of every request; 0 is greedy (default: %(default)s)",
    )


def _add_work(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        metavar="N",
        help="default: 1 8 64, or those of --sweep",
    )
    group.add_argument("--sweep", action="store_true", help="batch sizes 1, 2, 4, ... 256")
    group.add_argument(
        "--prompt-len", type=int, default=30, metavar="N", help="tokens (default: %(default)s)"
    )
    group.add_argument(
        "--new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="of each request, whatever they are (default: %(default)s)",
    )
    group.add_argument(
        "--prompt-period",
        type=int,
        metavar="N",
        help="prompts repeat themselves after so many tokens, which n-gram drafts like",
    )
    group.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="runs after one that warms up; the best counts (default: %(default)s)",
    )
    add_temperature_argument(group)
    add_draft_argument(group)
    group.add_argument(
        "--compare-plain",
        action="store_true",
        help="also the same engine without speculation, in turns",
    )


def add_draft_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--random-draft",
        type=int,
        metavar="VOCAB",
        help="make an EAGLE-3 draft of random weights and this vocabulary, for this run; force "
        "what it accepts with --speculative-simulate-accept-length",
    )


def add_bandwidth_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--bandwidth",
        type=float,
        metavar="GB/S",
        help="memory bandwidth of the device; default: that of a copy, measured",
    )


def add_output_arguments(group: argparse._ArgumentGroup, name: str) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="write DATE-NAME.json, .md and .png there"
    )
    group.add_argument(
        "--name", default=name, help="name of the files in --out (default: %(default)s)"
    )


def run(args: argparse.Namespace, turn: AbstractContextManager[None] | None = None) -> int:
    """turn: of ThroughputBench."""
    plan = plan_of(args)
    set_up_logging(plan.config.server.log_level)
    from specengine.cli.bench.tables import show_sheets
    from specengine.lab.environment import environment_line
    from specengine.lab.output import Output
    from specengine.lab.throughput.plot import draw
    from specengine.lab.throughput.run import ThroughputBench
    from specengine.lab.throughput.sheets import settings_lines, sheets

    output = Output(args.json, args.out, args.name)
    output.check()
    report = ThroughputBench(plan, output.write, turn).run()
    tables = list(sheets(report))
    show_sheets(report.title, environment_line(report.environment), tables)
    for path in output.finish(report, tables, partial(draw, report), settings_lines(report)):
        print(path)
    return 0


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises ConfigError."""
    config = config_of(args)
    check_counts(
        args, "batch_sizes", "prompt_len", "new_tokens", "prompt_period", "repeats", "random_draft"
    )
    check_temperature(args.temperature)
    if args.new_tokens < 2:
        raise ConfigError("--new-tokens 1: the prefill gives the first token; no round is left")
    if args.sweep and args.batch_sizes:
        raise ConfigError("--sweep or --batch-sizes: give one of them")
    from specengine.lab.throughput.plan import Plan
    from specengine.lab.throughput.workload import SWEEP, Workload

    sizes = SWEEP if args.sweep else tuple(dict.fromkeys(args.batch_sizes or (1, 8, 64)))
    work = Workload(
        sizes,
        args.prompt_len,
        args.new_tokens,
        args.repeats,
        args.prompt_period,
        args.temperature,
    )
    return Plan(
        config=config,
        workload=work,
        random_draft=args.random_draft,
        compare_plain=args.compare_plain,
        copy=copy_of(args),
        peers=args.peers,
    )


def copy_of(args: argparse.Namespace) -> float | None:
    """--bandwidth in bytes a second. Raises ConfigError."""
    if args.bandwidth is None:
        return None
    if not args.bandwidth > 0:
        raise ConfigError(f"--bandwidth {args.bandwidth:g}: must be above 0, in GB a second")
    return float(args.bandwidth) * 1e9


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError where one that is given lies below 1."""
    for name in names:
        value = getattr(args, name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if values and min(values) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {min(values)}: must be at least 1")
