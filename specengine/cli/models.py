"""List the models and drafters that have a name of their own."""

from __future__ import annotations

import argparse
import json
from typing import Any

from specengine.cli.args import add_config_arguments, config_of
from specengine.core.config_sources import config_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    add_config_arguments(parser, without=set(config_options()) - {"cache_dir"})


def run(args: argparse.Namespace) -> int:
    from specengine.draft.zoo.shipped import SHIPPED_DRAFTERS
    from specengine.runner.loader.builtin import BUILTIN_MODELS
    from specengine.runner.loader.source import cache_directory

    cache = cache_directory(config_of(args).model)
    models = [
        {
            "name": model.name,
            "kind": "model",
            "parameters": model.parameters,
            "description": model.description,
            "weights": "random" if model.is_shape else "real",
            "cached": model.is_cached(cache),
        }
        for model in BUILTIN_MODELS.values()
    ]
    drafters = [
        {
            "name": drafter.name,
            "kind": "drafter",
            "parameters": drafter.parameters,
            "description": drafter.description,
            "algorithm": drafter.algorithm,
            "target": drafter.target,
        }
        for drafter in SHIPPED_DRAFTERS.values()
    ]
    if args.json:
        print(json.dumps(models + drafters, indent=2))
    else:
        show(models, drafters)
    return 0


def show(models: list[dict[str, Any]], drafters: list[dict[str, Any]]) -> None:
    width = 2 + max(len(row["name"]) for row in models + drafters)
    for row in models:
        weights = "weights cached" if row["cached"] else "weights fetched at first use"
        if row["weights"] == "random":
            weights = "random weights, with --load-format dummy"
        print(f"{row['name']:<{width}}{row['parameters']:<7}{row['description']}; {weights}")
    print("Also: a directory of safetensors, a GGUF file, or a hub id (owner/name).")
    print("\nDrafters, for --speculative-draft-model-path:")
    for row in drafters:
        print(
            f"{row['name']:<{width}}{row['parameters']:<7}{row['description']}; drafts for "
            f"{row['target']} with --speculative-algorithm {row['algorithm']}, by default"
        )
