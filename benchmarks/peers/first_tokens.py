"""Time to the first token by the prompt's length: vLLM, SGLang and this engine, started at once on
one card and measured one at a time.

    python benchmarks/peers/first_tokens.py llama-3.1-8b-shape smollm2-shape --sglang PY --vllm PY \
        --ours qwen3-30b-a3b-shape llama-3.1-8b-shape smollm2-shape --out OUT

Each shape has a run of each peer. --ours: the shapes that this engine serves, one after another in
one process, in each of --modes (benchmarks/step/prefill_modes.py, whose table it writes). All runs
and the largest of these shapes must fit on the card together. OUT gets PEER-SHAPE.json of each
peer's run, and a log of every run. Status 1: one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from side_by_side import PEERS, Run, peer_runs, run_in_waves, share_of_memory

MODES = Path(__file__).resolve().parents[1] / "step/prefill_modes.py"
LENGTHS = (32, 128, 512, 1024, 2048, 4096)
REPEATS = 6
TOKENS = 8192  # of KV, more than a prompt of 4,096 and what engines reserve
LARGEST_GRAPH = 512  # tokens of vLLM's largest graph by default


def runs(args: argparse.Namespace) -> Iterator[Run]:
    pythons = {name: python for name in PEERS if (python := getattr(args, name))}
    count = len(pythons) * len(args.shapes) + bool(args.ours)
    lengths = [*map(str, args.lengths)]
    for shape in args.shapes:
        words = ["--model", shape, "--first-token", *lengths, "--repeats", str(REPEATS)]
        options = share_of_memory(count, TOKENS, token_bytes(shape)) + graph_options(args.lengths)
        yield from peer_runs(args.out, pythons, words, [], options, f"-{shape}")
    if args.ours:
        words = [*args.ours, "--modes", *args.modes, "--lengths", *lengths]
        yield Run("specengine", [sys.executable, str(MODES), *words])


def graph_options(lengths: Sequence[int]) -> list[str]:
    """Graphs of these lengths alone, which both have by default among some 50: they start sooner.
    vLLM would capture for one request at once, and for two tokens at most."""
    small = [1, 2, *(one for one in lengths if one <= LARGEST_GRAPH)]
    return [
        f"vllm:compilation_config={json.dumps({'cudagraph_capture_sizes': small})}",
        f"sglang:cuda_graph_bs_prefill={json.dumps([*lengths])}",
        "sglang:attention_backend=fa3",
        "sglang:mem_fraction_static=0.95",
    ]


def token_bytes(shape: str) -> int:
    """Of KV, in bfloat16."""
    from transformers import AutoConfig

    from specengine.runner.loader.builtin import BUILTIN_MODELS

    config: Any = AutoConfig.for_model(**BUILTIN_MODELS[shape].config)
    return int(config.num_hidden_layers * 2 * 2 * config.num_key_value_heads * config.head_dim)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [*runs(args)]
    return run_in_waves(wanted, len(wanted), args.out, args.starting, args.limit)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", help="of the peers")
    for name in PEERS:
        parser.add_argument(f"--{name}", metavar="PY", help="the interpreter that has it")
    parser.add_argument("--ours", nargs="+", default=[], metavar="SHAPE", help="largest first")
    parser.add_argument("--modes", nargs="+", default=["none", "full", "piecewise, eager"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[*LENGTHS], help="up to 4,096")
    parser.add_argument("--starting", type=float, default=200, help="seconds to be up in")
    parser.add_argument("--limit", type=float, default=400, help="seconds of all")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
