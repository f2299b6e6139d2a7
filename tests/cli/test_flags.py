"""The command line is frozen: a flag or default changes only together with flags.txt."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from pathlib import Path

from specengine.cli.args import SAMPLING_HELP
from specengine.cli.main import COMMANDS, build_parser
from specengine.core.config_sources import config_options
from specengine.core.options import options_of
from specengine.core.registry import ATTENTION_BACKENDS, LOAD_QUANTIZATIONS, VERIFIERS
from specengine.core.sampling import SamplingParams
from specengine.lab.generate.config import GenerationConfig

FROZEN = Path(__file__).with_name("flags.txt")
MORE_OPTIONS = {
    "generate": options_of(SamplingParams),
    "data make": GenerationConfig.options(),
}


def lines() -> Iterator[str]:
    """`command flag METAVAR = default` for every flag of every command."""
    for name, command in leaves(build_parser()):
        options = config_options() | MORE_OPTIONS.get(name, {})
        for action in command._actions[1:]:  # the first is --help
            option = options.get(action.dest)
            default = action.default if option is None else option.default
            flags = "/".join(action.option_strings) or action.dest
            metavar = "" if action.metavar is None else f" {registered(str(action.metavar))}"
            yield f"{name} {flags}{metavar} = {default!r}"


def registered(metavar: str) -> str:
    """Choices, those of a registry as one: what is registered adds to them."""
    for name, registry in (
        ("RULE", VERIFIERS),
        ("BACKEND", ATTENTION_BACKENDS),
        ("METHOD", ["int4", *LOAD_QUANTIZATIONS]),
    ):
        metavar = metavar.replace(",".join(registry), f"any {name}")
    return metavar


def commands() -> dict[str, argparse.ArgumentParser]:
    return subcommands(build_parser())


def leaves(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Commands that have no commands of their own, under their full names."""
    below = subcommands(parser)
    if not below:
        yield name, parser
    for word, command in below.items():
        yield from leaves(command, f"{name} {word}".strip())


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def test_flags_and_defaults_are_frozen() -> None:
    found, frozen = list(lines()), FROZEN.read_text().splitlines()
    changes = "\n".join(difflib.unified_diff(frozen, found, "flags.txt", "found", lineterm=""))
    assert not changes, f"change {FROZEN.name} as well if this is meant:\n{changes}"


def test_every_command_is_there() -> None:
    assert list(commands()) == list(COMMANDS)


def test_every_option_is_a_flag_of_serve() -> None:
    serve = commands()["serve"]
    assert set(config_options()) <= {action.dest for action in serve._actions}


def test_every_sampling_parameter_is_explained() -> None:
    assert list(SAMPLING_HELP) == list(options_of(SamplingParams))
