"""Measure where the time of a round goes, and how far it is from the device's limits."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from specengine.cli.args import add_config_arguments, add_model_argument, config_of
from specengine.cli.bench.accept import check_temperature
from specengine.cli.bench.throughput import (
    WITHOUT,
    add_bandwidth_argument,
    add_draft_argument,
    add_output_arguments,
    add_temperature_argument,
    check_counts,
    copy_of,
)
from specengine.cli.logs import set_up_logging
from specengine.core.errors import ConfigError

if TYPE_CHECKING:
    from specengine.lab.throughput.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1], metavar="N", help="default: 1"
    )
    group.add_argument(
        "--prompt-len", type=int, default=30, metavar="N", help="tokens (default: %(default)s)"
    )
    group.add_argument(
        "--new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="of each request: rounds enough for a mean (default: %(default)s)",
    )
    add_temperature_argument(group)
    add_draft_argument(group)
    group.add_argument("--nodes", action="store_true", help="list every kernel of a round")
    add_bandwidth_argument(parser.add_argument_group("what it is measured against"))
    add_output_arguments(parser.add_argument_group("results"), "step")
    add_config_arguments(parser, without=(*WITHOUT, "tp_size", "draft_tp_size"))


def run(args: argparse.Namespace) -> int:
    plan = plan_of(args)
    set_up_logging(plan.config.server.log_level)
    from specengine.cli.bench.tables import show_sheets
    from specengine.lab.environment import environment_line
    from specengine.lab.output import Output
    from specengine.lab.step.plot import draw
    from specengine.lab.step.run import StepBench
    from specengine.lab.step.sheets import sheets

    output = Output(args.json, args.out, args.name)
    output.check()
    report = StepBench(plan, output.write).run()
    tables = list(sheets(report, with_nodes=args.nodes))
    show_sheets(report.title, environment_line(report.environment), tables)
    for path in output.finish(report, tables, partial(draw, report)):
        print(path)
    return 0


def plan_of(args: argparse.Namespace) -> Plan:
    """Raises ConfigError."""
    config = config_of(args)
    check_counts(args, "batch_sizes", "prompt_len", "new_tokens", "random_draft")
    check_temperature(args.temperature)
    if args.new_tokens < 3:
        raise ConfigError(f"--new-tokens {args.new_tokens}: no round would follow another")
    from specengine.lab.throughput.plan import Plan
    from specengine.lab.throughput.workload import Workload

    sizes = tuple(dict.fromkeys(args.batch_sizes))
    work = Workload(sizes, args.prompt_len, args.new_tokens, temperature=args.temperature)
    return Plan(config, work, random_draft=args.random_draft, copy=copy_of(args))
