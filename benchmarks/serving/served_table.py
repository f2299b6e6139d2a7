"""What clients of a server see, ours and its peers': one shape after another by `bench serve`.

    python benchmarks/serving/served_table.py --out RESULTS
    python benchmarks/serving/served_table.py --out RESULTS --together \\
        --engines specengine vllm sglang --python-of vllm=PATH sglang=PATH
    python benchmarks/serving/served_table.py --out RESULTS --small   # tiny, on a CPU: does it run

Shapes have random weights, and EAGLE-3 drafts forced to an accepted length of 2.5. A peer is run by
the Python of --python-of NAME=PATH, by default this one; where PATH is empty, it is left out.
Engines are measured one after another. --together starts the servers of a shape at once, each with
its share of the card (ours, named first, a little before the others), and measures each alone when
all are up: the others have no requests meanwhile. An engine that is named twice runs twice. Each
server and each of its points has a limit of time; what it does not reach is left out and said.
Numbers are written as they come, the JSON of each point to RESULTS/SERVER-POINT.json, and the table
to standard output.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import COMMANDS, HEAD_START, ROOT, Server, Shape, running, say, shape_of

HEAD = "| server | load | output tok/s | prompt tok/s | TTFT p50 / p99 ms | TPOT p50 / p99 ms | τ |"


@dataclass(frozen=True)
class Work:
    """Points of load that belong together. options: of `bench serve`. seconds: its limit."""

    name: str
    options: str
    seconds: int


@dataclass(frozen=True)
class Setting:
    """Servers to start. draft_vocab: of an EAGLE-3 draft; None does not speculate. seconds: until
    a server is ready, where it starts alone."""

    name: str
    model: str
    draft_vocab: int | None
    works: tuple[Work, ...]
    seconds: int


LARGE = (
    Work(
        "streams",
        "--concurrency 1 8 64 --prompt-len 1024 --output-len 256 --num-prompts 4 32 192",
        100,
    ),
    Work("long", "--concurrency 1 8 --prompt-len 7900 --output-len 4 --num-prompts 12 24", 60),
    Work(
        "rate",
        "--request-rate 12 --prompt-len 512 --output-len 128 --num-prompts 240 "
        "--slo ttft=50,tpot=3.8",
        60,
    ),
)
SMALL_ONES = (Work("streams", "--concurrency 8 64 256 --prompt-len 30 --output-len 256", 60),)
SETTINGS = (
    Setting("135m", "smollm2-shape", None, SMALL_ONES, 120),
    Setting("8b", "llama-3.1-8b-shape", None, LARGE, 180),
    Setting("8b-eagle3", "llama-3.1-8b-shape", 32_000, LARGE, 180),
)
TRIAL = (
    Work("streams", "--concurrency 1 2 --prompt-len 30 --output-len 16 --num-prompts 4 6", 100),
    Work("rate", "--request-rate 4 --prompt-len 20 --output-len 8 --num-prompts 8", 100),
)
TRIAL_SETTINGS = (
    Setting("tiny", "tiny", None, TRIAL, 120),
    Setting("tiny-eagle3", "tiny", 300, TRIAL, 120),
)
CROWDED = 1.5  # times as long may a server start beside others


def main() -> int:
    args = parsed()
    args.out.mkdir(parents=True, exist_ok=True)
    print(HEAD + "\n" + "|---" * 7 + "|", flush=True)
    missing = 0
    for setting in TRIAL_SETTINGS if args.small else SETTINGS:
        if args.only is not None and setting.name not in args.only:
            continue
        with shape_of(setting.model, setting.draft_vocab) as shape:
            for group in groups(args, setting, shape):
                with running(group):
                    # Ended when measured: an idle server of ours may capture graphs meanwhile.
                    for one in group:
                        missing += measure(args, one, setting.works)
                        one.end()
    return 1 if missing else 0


def groups(args: argparse.Namespace, setting: Setting, shape: Shape) -> list[list[Server]]:
    """Servers that run at the same time, in the order of --engines."""
    pythons = dict(one.split("=", 1) for one in args.python_of)
    engines = [one for one in args.engines if pythons.get(one, sys.executable)]
    several = args.together and len(engines) > 1
    share = 1 / len(engines) if several else None
    servers = []
    for place, (engine, label) in enumerate(zip(engines, labels(engines), strict=True)):
        port, name = args.port + place, f"{label}-{setting.name}"
        command = [pythons.get(engine, sys.executable), *COMMANDS[engine](shape, port, share)]
        is_ours = engine == "specengine"
        command += args.serve_options.split() if is_ours else []
        seconds = setting.seconds * (CROWDED if several else 1)
        ahead = HEAD_START if is_ours and several else 0.0
        servers.append(Server(name, command, port, args.out / f"{name}.log", seconds, ahead))
    return [servers] if several else [[one] for one in servers]


def labels(engines: Sequence[str]) -> Iterator[str]:
    """The engine's name, with a number from the second of its name on."""
    for place, engine in enumerate(engines):
        before = engines[:place].count(engine)
        yield f"{engine}-{before + 1}" if before else engine


def measure(args: argparse.Namespace, server: Server, works: Sequence[Work]) -> int:
    """The number of points that are missing."""
    if not server.is_ready:
        return len(works)
    missing = 0
    for work in works:
        file = args.out / f"{server.name}-{work.name}.json"
        file.unlink(missing_ok=True)
        asked = [sys.executable, "-m", "specengine", "bench", "serve", "--base-url", server.url]
        asked += [*work.options.split(), "--vocab-size", str(args.vocab), "--label", server.name]
        asked += ["--json", str(file)]
        with file.with_suffix(".log").open("wb") as log:
            try:
                done = subprocess.run(
                    asked, cwd=ROOT, timeout=work.seconds, stdout=log, stderr=log
                ).returncode
            except subprocess.TimeoutExpired:
                done = 124
        if done:
            say(f"{server.name}, {work.name}: status {done}")
            missing += 1
        if file.exists():
            show(server.name, json.loads(file.read_text()))
    return missing


def show(name: str, report: dict[str, Any]) -> None:
    for point in report["points"]:
        ttft, tpot = (point["latencies"][one]["percentiles"] for one in ("ttft", "tpot"))
        tau = "–" if point["tau"] is None else f"{point['tau']:.2f}"
        lengths = f"{report['requests']['prompt_len']} in, {report['requests']['output_len']} out"
        cells = [
            name,
            f"{point['name']}, {lengths}",
            f"{point['output_rate']:,.0f}",
            f"{point['prompt_rate']:,.0f}",
            *(f"{number(one['50'])} / {number(one['99'])}" for one in (ttft, tpot)),
            tau,
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--engines", nargs="+", choices=COMMANDS, default=["specengine"])
    parser.add_argument(
        "--together", action="store_true", help="their servers start at once, on one card"
    )
    parser.add_argument("--python-of", nargs="+", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--only", nargs="+", metavar="SETTING", help="135m, 8b, 8b-eagle3")
    parser.add_argument("--serve-options", default="", help="more of `specengine serve`")
    parser.add_argument("--vocab", type=int, default=2000, help="random ids lie below it")
    parser.add_argument("--port", type=int, default=8917, help="of the first; then one each")
    parser.add_argument("--small", action="store_true", help="a trial with tiny")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
