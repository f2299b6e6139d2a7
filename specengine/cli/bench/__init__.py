"""Measure acceptance and speed."""

from __future__ import annotations

import argparse

from specengine.cli.bench import accept, serve, step, throughput

COMMANDS = {
    "accept": accept,
    "throughput": throughput,
    "step": step,
    "serve": serve,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="benches", metavar="BENCH", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name, help=summary.splitlines()[0], description=summary, allow_abbrev=False
        )
        module.add_arguments(command)
        command.set_defaults(run_bench=module.run)


def run(args: argparse.Namespace) -> int:
    status: int = args.run_bench(args)
    return status
