"""Make training data with a target, show them, join them."""

from __future__ import annotations

import argparse
from pathlib import Path

from specengine.cli.args import (
    add_config_arguments,
    add_model_argument,
    add_option_arguments,
    config_of,
    given,
)
from specengine.cli.logs import set_up_logging

# Options of the server, and of traces, which are for chats that are served.
WITHOUT = (
    "served_model_name",
    "max_queued_requests",
    "trace",
    "trace_every_position",
    "trace_max_mb",
    "tp_size",
    "draft_tp_size",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, add, command in (
        ("make", _add_make, make),
        ("show", _add_show, show),
        ("merge", _add_merge, merge),
        ("token-map", _add_token_map, token_map),
    ):
        summary = (command.__doc__ or "").strip().splitlines()[0]
        one = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add(one)
        one.set_defaults(run_data=command)


def run(args: argparse.Namespace) -> int:
    status: int = args.run_data(args)
    return status


def _add_make(parser: argparse.ArgumentParser) -> None:
    from specengine.lab.generate.config import GenerationConfig

    add_model_argument(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="where to write")
    parser.add_argument(
        "--recipe", type=Path, metavar="FILE", help="YAML file of the data options (max_len: 1024)"
    )
    add_option_arguments(parser, "data", GenerationConfig.options().values())
    add_config_arguments(parser, without=WITHOUT)


def make(args: argparse.Namespace) -> int:
    """Let a target answer prompts, from files or of its own writing."""
    from specengine.lab.generate.config import GenerationConfig
    from specengine.lab.generate.make import make_dataset
    from specengine.lab.generate.recipe import read_recipe
    from specengine.lab.generate.report import report
    from specengine.lab.generate.show import show_counts

    engine_config = config_of(args)
    config = read_recipe(args.recipe, given(args, GenerationConfig.options()))
    set_up_logging(engine_config.server.log_level)
    with report(config) as watch:
        dataset = make_dataset(engine_config, config, args.out, watch)
    show_counts(dataset)
    return 0


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="a data set")
    parser.add_argument(
        "--documents", type=int, default=3, metavar="N", help="how many to print (default: 3)"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="whose tokenizer to read with; default: the target's name"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which documents")


def show(args: argparse.Namespace) -> int:
    """Print what a data set has, and a few documents."""
    from specengine.draft.train.data.dataset import TokenDataset
    from specengine.lab.generate.show import show_counts, show_documents

    dataset = TokenDataset(args.directory)
    show_counts(dataset)
    if args.documents > 0:
        show_documents(dataset, args.documents, args.seed, args.model)
    return 0


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="OUT", help="where to write")
    parser.add_argument("parts", type=Path, nargs="+", metavar="DIR", help="data sets to join")


def merge(args: argparse.Namespace) -> int:
    """Join data sets of one target, equal documents once."""
    from specengine.draft.train.data.merge import merge_datasets
    from specengine.lab.generate.show import show_counts

    show_counts(merge_datasets(args.parts, args.directory))
    return 0


def _add_token_map(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="a data set, or a text file")
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="file to write: .json, .safetensors or .pt"
    )
    parser.add_argument("--size", type=int, required=True, metavar="N", help="tokens to keep")
    parser.add_argument(
        "--model", metavar="MODEL", help="the target, whose tokens a text is cut to"
    )


def token_map(args: argparse.Namespace) -> int:
    """Write the tokens that a corpus has most often, for --speculative-token-map."""
    from specengine.lab.token_map import make_token_map

    made = make_token_map(args.corpus, args.out, args.size, args.model)
    print(
        f"{args.out}: {made.num_tokens} of {made.vocab_size} tokens, {made.coverage:.2%} of what "
        "the corpus has"
    )
    return 0
