"""The accepted length of one EAGLE-3 drafter in whole engines: this one, vLLM and SGLang.

    python benchmarks/peers/acceptance.py specengine smollm2 draft/zoo/smollm2-135m-eagle3 \
        --prompts mt_bench humaneval gsm8k --count 16 --max-tokens 256 --json ours.json
    python benchmarks/peers/acceptance.py vllm TARGET draft/zoo/smollm2-135m-eagle3 \
        --beside ours.json --json vllm.json

The first run renders the prompts and keeps their token ids, its answers and its counts. A peer's
run, in an environment that has the peer and with the target as a directory of Hugging Face's
layout, answers the same ids, reads the peer's own counters, and prints both side by side: greedy, a
chain of num_steps. tau is 1 + accepted / rounds. Rounds are requests' rounds, and what one accepts
is counted before the answer is cut at its end.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from acceptance_engines import ENGINES, Answers, Setup

from specengine.lab.environment import environment, environment_line
from specengine.lab.files import write_text


@dataclass(frozen=True)
class Work:
    """What every engine is asked. prompts: token ids, by prompt set."""

    num_steps: int
    max_tokens: int
    stop_token_ids: list[int]
    prompts: dict[str, list[list[int]]]


@dataclass
class Record:
    """One engine's run, as its file keeps it."""

    engine: str
    dtype: str
    options: dict[str, Any]
    environment: dict[str, Any]
    work: Work
    results: dict[str, Answers] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Record:
        said = json.loads(file.read_text())
        said["work"] = Work(**said["work"])
        said["results"] = {name: Answers(**one) for name, one in said["results"].items()}
        return cls(**said)


def main(argv: list[str] | None = None) -> None:
    args = parsed(argv)
    beside = None if args.beside is None else Record.read(args.beside)
    work = rendered(args) if beside is None else beside.work
    options = dict(option.split("=", 1) for option in args.option)
    setup = Setup(
        target=args.target,
        draft=args.draft,
        dtype=args.dtype if beside is None else beside.dtype,
        num_steps=work.num_steps,
        max_tokens=work.max_tokens,
        stop_token_ids=work.stop_token_ids,
        options={name: json.loads(value) for name, value in options.items()},
    )
    if find_spec(args.engine) is None:
        sys.exit(
            f"{args.engine} is not installed in this environment: pip install {args.engine}, "
            f"or run this script with the Python of an environment that has it"
        )
    name, engine = ENGINES[args.engine](setup)
    record = Record(name, setup.dtype, setup.options, environment(), work)
    for prompt_set, prompts in work.prompts.items():
        record.results[prompt_set] = engine(prompts)
        write_text(args.json, json.dumps(asdict(record)) + "\n")
        print(prompt_set, f"tau {record.results[prompt_set].tau:.3f}", flush=True)
    print(environment_line(record.environment))
    print("\n".join(table(record, beside)))


def rendered(args: argparse.Namespace) -> Work:
    """Prompts in the target's chat template, which this engine reads."""
    if not args.prompts:
        sys.exit("--prompts names the prompt sets; or --beside a file of an earlier run")
    from specengine.core.config import ModelConfig
    from specengine.engine.chat_template import render_chat
    from specengine.lab.accept.prompts import find_prompt_sets
    from specengine.runner.loader.source import resolve_model
    from specengine.runner.loader.tokenizer import load_tokenizer

    source = resolve_model(ModelConfig(model=args.target))
    tokenizer = load_tokenizer(source)
    prompts = {
        one.name: [
            render_chat(tokenizer, [{"role": "user", "content": prompt.turns[0]}])
            for prompt in one.limited(args.count).prompts
        ]
        for one in find_prompt_sets(args.prompts, args.data_dir)
    }
    return Work(args.num_steps, args.max_tokens, sorted(source.eos_token_ids), prompts)


def table(record: Record, beside: Record | None) -> list[str]:
    """Markdown, a row a prompt set."""
    pairs = [(record, ""), *([] if beside is None else [(beside, f", {beside.engine}")])]
    heads = ["prompts", "answers"]
    heads += [head + of for head in ("rounds", "accepted", "tau") for _, of in pairs]
    heads += [] if beside is None else ["same answers", "same tokens"]
    rows = [heads, ["---"] * len(heads)]
    for name, result in record.results.items():
        both = [one.results[name] for one, _ in pairs]
        row = [name, str(len(result.tokens))]
        row += [str(one.rounds) for one in both] + [str(one.accepted) for one in both]
        row += [f"{one.tau:.3f}" for one in both]
        if beside is not None:
            agreement = agree(*both)
            row += [f"{agreement.answers} of {len(result.tokens)}", f"{agreement.tokens:.1%}"]
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in rows]


@dataclass(frozen=True)
class Agreement:
    """tokens: the share that comes before the first that differs."""

    answers: int
    tokens: float


def agree(one: Answers, other: Answers) -> Agreement:
    same = total = answers = 0
    for mine, theirs in zip(one.tokens, other.tokens, strict=True):
        pairs = list(zip(mine, theirs, strict=False))
        longest = max(len(mine), len(theirs))
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same, total = same + shared, total + longest
        answers += shared == longest
    return Agreement(answers, same / total)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An EAGLE-3 drafter's tau in a whole engine.")
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("target", help="a directory; for specengine, whatever it calls a model")
    parser.add_argument("draft")
    parser.add_argument("--prompts", nargs="+", help="sets or JSONL files, with specengine first")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--count", type=int, default=16, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--beside", type=Path, metavar="FILE", help="do the work of this earlier run, and compare"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=JSON", help="the engine's own"
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
