"""The `specengine` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from specengine.cli import (
    bench,
    convert,
    data,
    demo,
    doctor,
    generate,
    models,
    replay,
    serve,
    train,
    verify,
)
from specengine.core.errors import ConfigError, RequestError, SpecEngineError
from specengine.core.version import __version__

COMMANDS = {
    "serve": serve,
    "generate": generate,
    "demo": demo,
    "verify": verify,
    "models": models,
    "bench": bench,
    "data": data,
    "train": train,
    "replay": replay,
    "convert": convert,
    "doctor": doctor,
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specengine",
        description="A speculative-decoding engine and laboratory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"specengine {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip()
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for a failure, 2 for bad usage, 130 for Ctrl-C."""
    parser = build_parser()
    args = _parse(parser, argv)
    if not hasattr(args, "run"):
        parser.print_help()
        return 2
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except SpecEngineError as error:
        print(f"{_red('error:')} {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | RequestError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """argparse fills optional positional arguments all at once: with flags between MODEL and
    PROMPT the latter is left over."""
    args, rest = parser.parse_known_args(argv)
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(args, "text", "") is None:
        args.text = rest[0]
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _red(text: str) -> str:
    colours = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[31m{text}\x1b[0m" if colours else text
