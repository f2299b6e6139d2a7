"""Train a drafter for a target, or a small target."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from specengine.cli.logs import set_up_logging

if TYPE_CHECKING:
    from specengine.draft.train.loop import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind", metavar="KIND", help="what to train: eagle3, dflash, mtp, standalone or target"
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a recipe")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="SECTION.KEY=VALUE",
        help="instead of what the file says, such as run.max_minutes=10",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the resulting configuration, every key with its meaning, and exit",
    )
    parser.add_argument(
        "--on-policy",
        nargs="?",
        type=int,
        const=4,
        metavar="ROUNDS",
        help="train on answers of an engine that takes the new weights after each of so many "
        "rounds (default: 4); the same as run.on_policy_rounds",
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="how much is logged (default: info)",
    )


def run(args: argparse.Namespace) -> int:
    """0 where the run reached its end; 128 + the signal where one stopped it after a checkpoint."""
    is_first = os.environ.get("RANK", "0") == "0"  # of torchrun's processes
    set_up_logging(args.log_level if is_first else "error")
    from specengine.draft.train.config import load_config, to_yaml
    from specengine.draft.train.recipes_folder import find_recipe
    from specengine.lab.training import config_class, train

    overrides = list(args.overrides)
    if args.on_policy is not None:
        overrides.append(f"run.on_policy_rounds={args.on_policy}")
    config = load_config(config_class(args.kind), find_recipe(args.config), overrides)
    if args.print_config:
        print(to_yaml(config), end="")
        return 0
    outcome = train(args.kind, config)
    if is_first:
        show(outcome)
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


def show(outcome: Outcome) -> None:
    if outcome.stopped_by:
        print(f"stopped after step {outcome.step}; go on with run.resume=true")
        return
    for what, values in (("held out", outcome.held_out), ("in the engine", outcome.probe)):
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        if numbers:
            print(f"{what}: {numbers}")
    print(f"exported after step {outcome.step}: {outcome.export}")
