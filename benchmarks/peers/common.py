"""What the peers' benchmarks share: the work of `specengine bench throughput`, and its JSON.

They run in the peer's own environment, where this project need not be installed: its sources are
found beside this folder, and only parts that need little beyond torch and transformers are used.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from turns import turn

from specengine.lab.environment import environment, process_seconds
from specengine.lab.files import write_text
from specengine.lab.throughput.random_draft import write_random_eagle3
from specengine.lab.throughput.report import PLAIN, Point, Report, Setting, Startup
from specengine.lab.throughput.workload import SWEEP, Workload

NGRAM, EAGLE3, MTP = "NGRAM", "EAGLE3", "MTP"


@dataclass(frozen=True)
class Spec:
    """How the peer speculates; algorithm None does not."""

    algorithm: str | None
    num_steps: int
    accept_length: float | None  # forced, of EAGLE-3 and MTP
    draft: Path | None  # of EAGLE-3; an MTP layer is in the model's folder


@dataclass(frozen=True)
class Model:
    """A folder that the peer can load; of a shape its configuration alone. options: of the peer's
    engine, over those that these scripts set."""

    name: str
    folder: Path
    is_shape: bool
    vocab_size: int
    tp_size: int  # cards that share it
    options: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Of one batch: new tokens of each request, and of all together what was drafted and accepted,
    in so many rounds; None where the peer does not tell."""

    tokens: list[int]
    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None


LEAST_CONTEXT = 4096  # tokens

Generate = Callable[[list[list[int]]], Outcome]  # prompts as token ids
Start = Callable[[Model, Spec, Workload], tuple[Generate, dict[str, Any]]]  # and the peer's options


def run(peer: str, package: str, start: Start, argv: Sequence[str] | None = None) -> None:
    """Parse, measure, write. `start` builds the peer's engine."""
    args = _parse(peer, argv)
    if find_spec(package) is None:
        sys.exit(
            f"{peer} is not installed in this environment: pip install {package}, or run this "
            f"script with the Python of an environment that has it"
        )
    sizes = SWEEP if args.sweep else tuple(args.batch_sizes)
    work = Workload(sizes, args.prompt_len, args.new_tokens, args.repeats, args.prompt_period)
    if args.first_token:
        work = Workload((1,), max(args.first_token), 1, args.repeats)
    with _model(args) as model, _spec(args, model) as spec:
        begun = perf_counter()
        generate, options = start(model, spec, work)
        startup = Startup(perf_counter() - begun, process=process_seconds())
        if args.first_token:
            with turn(args.turns):
                found = first_tokens(generate, work, args.first_token, model.vocab_size)
            facts = {"environment": environment(), "engine": f"{peer} {version(package)}"}
            whole = facts | {"model": model.name, "options": options, "first_token": found}
            write_text(args.json, json.dumps(whole, indent=1))
            return
        is_lossy = spec.accept_length is not None
        setting = Setting(spec.algorithm or PLAIN, options, startup, is_lossy=is_lossy)
        report = Report(
            date=datetime.date.today().isoformat(),
            environment=environment(),
            engine=f"{peer} {version(package)}",
            model={"name": model.name, "dtype": "bfloat16", "device": "cuda"},
            workload=work,
            settings=[setting],
        )
        with turn(args.turns):
            sweep(generate, report, args.json, model.vocab_size)
    print(args.json)


def sweep(generate: Generate, report: Report, path: Path, vocab_size: int) -> None:
    """Every batch size, written as they come."""
    (setting,) = report.settings
    for size in report.workload.batch_sizes:
        setting.points.append(measure(generate, report.workload, size, vocab_size))
        point = setting.points[-1]
        tau = "unknown" if point.tau is None else f"{point.tau:.2f}"
        print(f"{setting.name}, batch size {size}: {point.rate:.0f} tok/s, τ {tau}", flush=True)
        write_text(path, report.to_json())


def measure(generate: Generate, work: Workload, batch_size: int, vocab_size: int) -> Point:
    """The first run warms up. Raises SystemExit where tokens are missing."""
    rates, best = [], Outcome([])
    for number, prompts in enumerate(work.batches(batch_size, vocab_size)):
        begun = perf_counter()
        outcome = generate(prompts)
        seconds = perf_counter() - begun
        if outcome.tokens != [work.new_tokens] * batch_size:
            sys.exit(f"{work.new_tokens} new tokens were asked of each request: {outcome.tokens}")
        rate = sum(outcome.tokens) / seconds
        if number and rate > max(rates, default=0.0):
            best = outcome
        if number:
            rates.append(rate)
    rounds = best.rounds
    if not rounds:
        return Point(batch_size, tuple(rates))
    tau = None if best.accepted is None else 1 + best.accepted / rounds
    drafted = None if best.drafted is None else best.drafted / rounds
    return Point(batch_size, tuple(rates), tau, rounds / batch_size, drafted)


def first_tokens(
    generate: Generate, work: Workload, lengths: Sequence[int], vocab_size: int
) -> dict[str, float]:
    """Milliseconds until one request alone has its first token, by the prompt's length: medians of
    all runs but the first."""
    found = {}
    for length in lengths:
        times = []
        for prompts in replace(work, prompt_len=length).batches(1, vocab_size):
            begun = perf_counter()
            generate(prompts)
            times.append(1000 * (perf_counter() - begun))
        found[str(length)] = median(times[1:])
        print(f"{length} tokens: {found[str(length)]:.1f} ms", flush=True)
    return found


def _parse(peer: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"The work of `bench throughput` on {peer}.")
    parser.add_argument("--model", default="smollm2-shape", help="a built-in shape, or a folder")
    parser.add_argument("--algorithm", choices=[EAGLE3, MTP, NGRAM], help="default: none")
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--tp-size", type=int, default=1, help="cards that share the model")
    parser.add_argument("--random-draft", type=int, default=16384, metavar="VOCAB")
    parser.add_argument(
        "--accept-length", type=float, default=2.5, help="forced, of EAGLE3 and MTP"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--sweep", action="store_true", help="batch sizes 1, 2, 4, ... 256")
    parser.add_argument("--prompt-len", type=int, default=30)
    parser.add_argument("--prompt-period", type=int)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--first-token", type=int, nargs="+", metavar="N", help="time prompts of so many tokens"
    )
    parser.add_argument(
        "--turns", type=Path, metavar="FOLDER", help="start beside others, be measured alone"
    )
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="of the peer's engine: a name and a value, in JSON or as it stands",
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    return parser.parse_args(argv)


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: NAME=JSON")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@contextmanager
def _model(args: argparse.Namespace) -> Iterator[Model]:
    name, more = args.model, (args.tp_size, dict(args.option))
    if Path(name).is_dir():
        config = json.loads((Path(name) / "config.json").read_text())
        yield Model(Path(name).resolve().name, Path(name), False, config["vocab_size"], *more)
        return
    fields = _shape(name)
    with tempfile.TemporaryDirectory(prefix="shape-") as folder:
        write_config(fields, Path(folder))
        yield Model(name, Path(folder), True, fields["vocab_size"], *more)


def write_config(fields: dict[str, Any], folder: Path) -> None:
    """config.json with the defaults of transformers, and with fields that it reads and does not
    write again, which peers ask for (full_attention_interval)."""
    from transformers import AutoConfig

    AutoConfig.for_model(**fields).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(fields | json.loads(path.read_text()), indent=1))


@contextmanager
def _spec(args: argparse.Namespace, model: Model) -> Iterator[Spec]:
    if args.algorithm != EAGLE3:
        forced = args.accept_length if args.algorithm == MTP else None
        yield Spec(args.algorithm, args.num_steps, forced, None)
        return
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory(prefix="random-eagle3-") as folder:
        config = AutoConfig.from_pretrained(model.folder)
        with _one_thread():
            write_random_eagle3(Path(folder), config, args.random_draft)
        yield Spec(EAGLE3, args.num_steps, args.accept_length, Path(folder))


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch starts no others. vLLM forks its engine, which would wait forever for threads of
    this process."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def _shape(name: str) -> dict[str, Any]:
    from specengine.runner.loader.builtin import BUILTIN_MODELS

    shapes = [one.name for one in BUILTIN_MODELS.values() if one.is_shape]
    if name not in shapes:
        sys.exit(f"--model {name}: neither a folder nor one of the shapes {', '.join(shapes)}")
    return BUILTIN_MODELS[name].config
