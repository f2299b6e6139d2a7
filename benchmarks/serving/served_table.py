"""What clients of a server see, ours and its peers': one shape after another by `bench serve`.

    python benchmarks/serving/served_table.py --out RESULTS
    python benchmarks/serving/served_table.py --out RESULTS --engines specengine vllm sglang
    python benchmarks/serving/served_table.py --out RESULTS --small   # tiny, on a CPU: does it run

Shapes have random weights, and EAGLE-3 drafts forced to an accepted length of 2.5. A peer is run by
the Python of --python-of NAME=PATH, by default this one. Each server and each of its points has a
limit of time; what it does not reach is left out and said. Numbers are written as they come, the
JSON of each point to RESULTS/SERVER-POINT.json, and the table to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED = 2.5
NUM_STEPS = 3
CONTEXT = 8448  # tokens
HEAD = "| server | load | output tok/s | prompt tok/s | TTFT p50 / p99 ms | TPOT p50 / p99 ms | τ |"


@dataclass(frozen=True)
class Work:
    """Points of load that belong together. options: of `bench serve`. seconds: its limit."""

    name: str
    options: str
    seconds: int


@dataclass(frozen=True)
class Setting:
    """A server to start. draft_vocab: of an EAGLE-3 draft; None does not speculate. seconds: until
    it is ready."""

    name: str
    model: str
    draft_vocab: int | None
    works: tuple[Work, ...]
    seconds: int


LARGE = (
    Work("streams", "--concurrency 1 8 64 --prompt-len 1024 --output-len 256", 100),
    Work("long", "--concurrency 1 8 --prompt-len 7900 --output-len 4 --num-prompts 24", 60),
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
    Work("streams", "--concurrency 1 2 --prompt-len 30 --output-len 16 --num-prompts 4", 100),
    Work("rate", "--request-rate 4 --prompt-len 20 --output-len 8 --num-prompts 8", 100),
)
TRIAL_SETTINGS = (
    Setting("tiny", "tiny", None, TRIAL, 120),
    Setting("tiny-eagle3", "tiny", 300, TRIAL, 120),
)


def main() -> int:
    args = parsed()
    pythons = dict(one.split("=", 1) for one in args.python_of)
    args.out.mkdir(parents=True, exist_ok=True)
    print(HEAD + "\n" + "|---" * 7 + "|", flush=True)
    missing = 0
    chosen = [one for one in settings_of(args) if args.only is None or one.name in args.only]
    for setting in chosen:
        with folders(setting) as (model, draft):
            for engine in args.engines:
                python = pythons.get(engine, sys.executable)
                command = COMMANDS[engine](setting, model, draft, args)
                missing += measure(args, engine, setting, [python, *command])
    return 1 if missing else 0


def measure(args: argparse.Namespace, engine: str, setting: Setting, command: list[str]) -> int:
    """The number of points that are missing."""
    name, missing = f"{engine}-{setting.name}", 0
    with server(command, args.out / f"{name}.log", args.port, setting.seconds) as url:
        if url is None:
            say(f"{name}: not ready in {setting.seconds} s; see {name}.log")
            return len(setting.works)
        for work in setting.works:
            file = args.out / f"{name}-{work.name}.json"
            file.unlink(missing_ok=True)
            asked = [sys.executable, "-m", "specengine", "bench", "serve", "--base-url", url]
            asked += [*work.options.split(), "--vocab-size", str(args.vocab), "--label", engine]
            asked += ["--json", str(file)]
            with (args.out / f"{name}-{work.name}.log").open("wb") as log:
                try:
                    done = subprocess.run(
                        asked, cwd=ROOT, timeout=work.seconds, stdout=log, stderr=log
                    ).returncode
                except subprocess.TimeoutExpired:
                    done = 124
            if done:
                say(f"{name}, {work.name}: status {done}")
                missing += 1
            if file.exists():
                show(name, json.loads(file.read_text()))
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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def server(command: list[str], log: Path, port: int, seconds: int) -> Iterator[str | None]:
    """Its URL once it answers; None where it does not in time."""
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPTED)}
    environment["SIMULATE_ACC_LEN"] = str(ACCEPTED)  # of older versions
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        begun = time.monotonic()
        while not (ready := answers(url)) and process.poll() is None:
            if time.monotonic() - begun > seconds:
                break
            time.sleep(0.5)
        if ready:
            say(f"{log.stem}: ready after {time.monotonic() - begun:.0f} s")
        yield url if ready else None
    finally:
        end(process)


def answers(url: str) -> bool:
    """Whether it completes a prompt. Servers listen, and some say that they are well, before."""
    body = {"model": model_of(url), "prompt": [1, 2, 3], "max_tokens": 2}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def model_of(url: str) -> str:
    try:
        with urllib.request.urlopen(url + "/v1/models", timeout=5) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError):
        return ""


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    for how, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, how)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    time.sleep(1)  # the card's memory is given back


@contextmanager
def folders(setting: Setting) -> Iterator[tuple[Path, Path | None]]:
    """Of the model, configuration and tokenizer alone, for peers; and of the draft."""
    from transformers import AutoConfig

    from specengine.lab.throughput.random_draft import write_random_eagle3
    from specengine.runner.loader.builtin import BUILTIN_MODELS
    from specengine.runner.loader.tokenizer import byte_tokenizer

    with tempfile.TemporaryDirectory(prefix="served-") as name:
        model, draft = Path(name) / "model", Path(name) / "draft"
        built_in = BUILTIN_MODELS[setting.model]
        if built_in.is_shape:
            config: Any = AutoConfig.for_model(**built_in.config)
            config.architectures = ["LlamaForCausalLM"]
            config.save_pretrained(model)
            byte_tokenizer(config.vocab_size).save_pretrained(model)
        if setting.draft_vocab is None:
            yield model, None
        elif not built_in.is_shape:  # it has a draft of its own
            yield model, ROOT / "draft/zoo/tiny-eagle3"
        else:
            draft.mkdir()
            write_random_eagle3(draft, config, setting.draft_vocab)
            yield model, draft


def ours(setting: Setting, model: Path, draft: Path | None, args: argparse.Namespace) -> list[str]:
    command = ["-m", "specengine", "serve", setting.model, "--port", str(args.port)]
    if setting.model.endswith("-shape"):
        command += ["--load-format", "dummy", "--context-length", str(CONTEXT)]
    if draft is not None:
        command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path"]
        command += [str(draft), "--speculative-num-steps", str(NUM_STEPS)]
        command += ["--speculative-simulate-accept-length", str(ACCEPTED)]
    return [*command, *args.serve_options.split()]


def vllm(setting: Setting, model: Path, draft: Path | None, args: argparse.Namespace) -> list[str]:
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    command += ["--max-num-seqs", "256", "--no-enable-prefix-caching", "--port", str(args.port)]
    if draft is None:
        return command
    asked = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": NUM_STEPS,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": ACCEPTED,
    }
    return [*command, "--speculative-config", json.dumps(asked)]


def sglang(
    setting: Setting, model: Path, draft: Path | None, args: argparse.Namespace
) -> list[str]:
    command = ["-m", "sglang.launch_server", "--model-path", str(model), "--load-format", "dummy"]
    command += ["--dtype", "bfloat16", "--context-length", str(CONTEXT), "--disable-radix-cache"]
    command += ["--max-running-requests", "256", "--port", str(args.port)]
    if draft is not None:
        command += ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "1"]
        command += ["--speculative-draft-model-path", str(draft)]
        command += ["--speculative-num-steps", str(NUM_STEPS)]
        command += ["--speculative-num-draft-tokens", str(NUM_STEPS + 1)]
        command += ["--speculative-draft-load-format", "auto"]  # the draft has weights
    return command


COMMANDS = {"specengine": ours, "vllm": vllm, "sglang": sglang}


def settings_of(args: argparse.Namespace) -> tuple[Setting, ...]:
    return TRIAL_SETTINGS if args.small else SETTINGS


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--engines", nargs="+", choices=COMMANDS, default=["specengine"])
    parser.add_argument("--python-of", nargs="+", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--only", nargs="+", metavar="SETTING", help="135m, 8b, 8b-eagle3")
    parser.add_argument("--serve-options", default="", help="more of `specengine serve`")
    parser.add_argument("--vocab", type=int, default=2000, help="random ids lie below it")
    parser.add_argument("--port", type=int, default=8917)
    parser.add_argument("--small", action="store_true", help="a trial with tiny")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
