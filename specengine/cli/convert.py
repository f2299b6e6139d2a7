"""Convert an EAGLE-3 draft between the layouts of SGLang and of vLLM (speculators), and pickled
weights of EAGLE drafts to safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

from specengine.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", help="the draft: a directory, hub id or built-in name"
    )
    parser.add_argument("destination", type=Path, metavar="DST", help="directory to make")
    parser.add_argument(
        "--to",
        metavar="{sglang,speculators}",
        help="layout to write; default: the other one, or of pickled weights (*.bin) their own, as "
        "safetensors",
    )
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="what vLLM is to serve the draft with; speculators writes it down",
    )
    parser.add_argument(
        "--target-architecture",
        action="append",
        default=[],
        metavar="NAME",
        help="of the target, such as LlamaForCausalLM; default: read from its config.json, where "
        "the target is a directory",
    )
    parser.add_argument(
        "--head-from",
        metavar="MODEL",
        help="the target, a directory or built-in name: its rows for a draft without a head of its "
        "own, which neither SGLang nor vLLM takes",
    )
    parser.add_argument(
        "--speculative-tokens",
        type=int,
        default=3,
        metavar="N",
        help="tokens that vLLM drafts a round unless set otherwise (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace DST")


def run(args: argparse.Namespace) -> int:
    from specengine.draft.eagle.convert import LAYOUTS, Conversion, convert, pickled_in_place

    if args.to is not None and args.to not in LAYOUTS:
        raise ConfigError(f"--to {args.to}: must be one of {', '.join(LAYOUTS)}")
    if args.speculative_tokens < 1:
        raise ConfigError("--speculative-tokens must be at least 1")
    if (directory := pickled_in_place(args.source, args.to)) is not None:
        _rewrite(directory, args)
        return 0
    done = convert(
        args.source,
        args.destination,
        Conversion(
            to=args.to,
            target=args.target,
            target_architectures=tuple(args.target_architecture or architectures(args.target)),
            num_tokens=args.speculative_tokens,
            head_from=None if args.head_from is None else directory_of(args.head_from),
            force=args.force,
        ),
    )
    print(f"{args.destination}: in the layout of {done.to}")
    if done.left_out:
        print(
            f"left out, as they say nothing of what the draft computes: {', '.join(done.left_out)}"
        )
    print(f"proof: {done.proof}")
    return 0


def _rewrite(directory: Path, args: argparse.Namespace) -> None:
    from specengine.draft.eagle.convert_pickled import rewrite

    done = rewrite(directory, args.destination, args.force)
    print(f"{args.destination}: a draft of {done.algorithm}, as safetensors")
    print(f"added to config.json: {', '.join(done.added) or 'nothing'}")
    print(f"proof: {done.num_tensors} tensors read back as they were; the draft loads")


def directory_of(model: str) -> Path:
    """Raises ModelLoadError or ConfigError where it has none."""
    from specengine.core.config import ModelConfig
    from specengine.runner.loader.source import resolve_model

    source = resolve_model(ModelConfig(model=model))
    if source.directory is None:
        raise ConfigError(f"--head-from {model}: give a directory of safetensors")
    return source.directory


def architectures(target: str | None) -> list[str]:
    """The architectures of a target that is a directory; of others nothing is known."""
    if target is None or not Path(target).is_dir():
        return []
    from specengine.runner.loader.hf_directory import read_config

    return list(getattr(read_config(Path(target)), "architectures", None) or [])
