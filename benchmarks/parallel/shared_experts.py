"""Two engines with requests of their own that share experts (--enable-dp-attention), a GPU each:
are the tokens those of an engine alone, with either idle; and how fast is it, with one idle and
with both busy.

    NCCL_NVLS_ENABLE=0 python benchmarks/parallel/shared_experts.py --out $OUT/shared_experts.json

Needs no weights. --parts runs some of it; --device cpu --small tries the script.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.parallel.shapes import write_shape  # noqa: E402
from specengine import SamplingParams, SpecConfig  # noqa: E402
from specengine.core.config import EngineConfig  # noqa: E402
from specengine.core.config_sources import config_from_flags  # noqa: E402
from specengine.core.sharing import ExpertSharers  # noqa: E402
from specengine.engine.build import build_engine, load  # noqa: E402
from specengine.engine.loop import Engine  # noqa: E402
from specengine.engine.phases import Phases  # noqa: E402
from specengine.engine.resolve import resolve_device  # noqa: E402
from specengine.engine.sharing import Meeting, meet  # noqa: E402
from specengine.runner.loader.loaded_model import LoadedModel  # noqa: E402

CHAIN: dict[str, Any] = {"num_steps": 3, "adaptive": False}
SPECS: dict[str, SpecConfig | None] = {
    "plain": None,
    "eagle3": SpecConfig(algorithm="EAGLE3", **CHAIN),
    "mtp": SpecConfig(algorithm="MTP", **CHAIN),
}
FORCED = SpecConfig(algorithm="EAGLE3", **CHAIN, simulate_accept_length=2.5)
PROMPTS = [[(7 * i * i + n * i) % 500 + 5 for i in range(9 + 5 * n)] for n in range(1, 4)]
ASKED = [
    *(SamplingParams(max_tokens=24, temperature=0, ignore_eos=True) for _ in PROMPTS),
    *(
        SamplingParams(max_tokens=16, temperature=0.8, top_p=0.9, seed=seed, ignore_eos=True)
        for seed in range(3)
    ),
]
CHUNK = 16  # steps between two looks whether all ranks are done
BATCH_SIZES = (1, 8, 64)

Said = dict[str, list[int]]


@dataclass
class Rank:
    """sharers: over both."""

    number: int
    folder: Path
    args: argparse.Namespace
    found: dict[str, Any]
    sharers: ExpertSharers

    @property
    def few_layers(self) -> str:
        """The shape with 8 layers in place of 48."""
        small = "small experts", "30b-a3b, 8 layers, few tokens"
        return write_shape(small[0 if self.args.small else 1], self.folder)

    def note(self, part: str, name: str, value: Any) -> None:
        self.found.setdefault(part, {})[name] = value
        faulthandler.dump_traceback_later(self.args.hangs_after, exit=True)
        print(f"rank {self.number} {part:>10}  {name:<44} {value}", flush=True)
        (self.folder / f"rank{self.number}.json").write_text(json.dumps(self.found))

    def config(self, spec: SpecConfig | None = None, **flags: Any) -> EngineConfig:
        given = {"device": self.args.device, "random_seed": 7, "load_format": "dummy"}
        given |= {"max_running_requests": 64, "disable_cuda_graph": self.args.no_graphs}
        return config_from_flags(given | flags, spec)

    def is_busy(self, engine: Engine) -> bool:
        """On any rank."""
        return self.sharers.communicator.greatest([int(engine.has_work)]) == [1]


def run(rank: Rank, engine: Engine, names: list[int], together: bool) -> Said:
    """Requests by number; those with an odd one come later. together: all ranks step as often."""
    said: Said = {}

    def step() -> None:
        for output in engine.step():
            said[output.rid] = output.token_ids

    for late in (0, 1):
        for name in names:
            if name % 2 == late:
                engine.add_request(str(name), PROMPTS[name % 3], ASKED[name])
        if not late:
            for _ in range(7):
                step()
    while rank.is_busy(engine) if together else engine.has_work:
        for _ in range(CHUNK if together else 1):
            step()
    return said


def identity(rank: Rank) -> None:
    """float32. An engine with all experts on this card, and the ones that share them."""
    flags = {
        "model": rank.few_layers,
        "dtype": "float32",
        "max_total_tokens": 8192,
        "context_length": 1024,
    }
    flags |= {"cuda_graph_bs": (1, 4)}
    specs = {name: SPECS[name] for name in rank.args.specs}
    whole = load(rank.config(**flags), Phases())
    expected = {name: alone(rank, flags, spec, whole) for name, spec in specs.items()}
    del whole
    free(rank)
    loaded = load(rank.config(**flags), Phases(), None, rank.sharers)
    for name, spec in specs.items():
        engine = build_engine(rank.config(spec, **flags), loaded)
        for busy in ((True, False), (False, True), (True, True)):
            names = list(range(6)) if busy[rank.number] else []
            before = rank.sharers.num_idle
            said = run(rank, engine, names, together=True)
            same = said == {key: expected[name][key] for key in map(str, names)}
            kind = "no device rounds" if engine.device_rounds is None else "device rounds"
            idle = rank.sharers.num_idle - before
            verdict = "same" if same else "DIFFERENT"
            rank.note("identity", f"{name}, busy {busy}", f"{verdict}; {idle} idle; {kind}")
        engine.close()
        del engine
        free(rank)


def alone(rank: Rank, flags: dict[str, Any], spec: SpecConfig | None, loaded: LoadedModel) -> Said:
    engine = build_engine(rank.config(spec, **flags), loaded)
    said = run(rank, engine, list(range(6)), together=False)
    engine.close()
    return said


def free(rank: Rank) -> None:
    import gc

    rank.sharers.forget_models()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def speed(rank: Rank) -> None:
    """bfloat16: 30 tokens in, --new-tokens out. One engine busy, then both; beside one alone with
    all experts, where they fit."""
    name = "small experts" if rank.args.small else rank.args.shape
    flags: dict[str, Any] = {"model": write_shape(name, rank.folder), "dtype": "bfloat16"}
    flags |= {"cuda_graph_bs": BATCH_SIZES, "max_total_tokens": 64 * 512, "context_length": 2048}
    start = time.perf_counter()
    loaded = load(rank.config(**flags), Phases(), None, rank.sharers)
    rank.note("speed", "loading, seconds", round(time.perf_counter() - start, 1))
    kinds = {"plain": None, "eagle3 forced 2.5": FORCED}
    for kind, spec in list(kinds.items())[: rank.args.kinds]:
        engine = build_engine(rank.config(spec, **flags), loaded)
        for size in BATCH_SIZES:
            for busy in ((True, False), (True, True)):
                rate = rate_of(rank, engine, size if busy[rank.number] else 0)
                rank.note("speed", f"{kind}, batch {size}, busy {busy}", rate)
        engine.close()
        del engine
        free(rank)


def rate_of(rank: Rank, engine: Engine, size: int, runs: int = 2) -> str:
    """tok/s of this rank, of the best of `runs` behind one that warms up."""
    tokens, best = rank.args.new_tokens, 0.0
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for number in range(runs + 1):
        start, ended = time.perf_counter(), 0.0
        for one in range(size):
            prompt = [(31 * i + 7 * one + number) % 400 + 5 for i in range(30)]
            engine.add_request(f"{number} {one}", prompt, params, stream=False)
        while rank.is_busy(engine):
            for _ in range(CHUNK):
                engine.step()
                if size and not ended and not engine.has_work:
                    ended = time.perf_counter()
        if number and size:
            best = max(best, size * tokens / (ended - start))
    return f"{best:.1f} tok/s" if size else "idle"


def soak(rank: Rank) -> None:
    """Of the shape with 8 layers and MTP, whose layer has experts too, as deep as each engine
    chooses: requests come and go at random on both for --soak seconds. How many rounds, and does
    every request end?"""
    flags: dict[str, Any] = {"model": rank.few_layers, "dtype": "bfloat16"}
    flags |= {"cuda_graph_bs": (1, 4, 16), "max_total_tokens": 16384, "context_length": 1024}
    loaded = load(rank.config(**flags), Phases(), None, rank.sharers)
    engine = build_engine(rank.config(SpecConfig(algorithm="MTP", num_steps=3), **flags), loaded)
    draws, params = random.Random(rank.number), SamplingParams(max_tokens=40, temperature=0)
    rounds, number, ended, before = engine.device_rounds, 0, 0, rank.sharers.num_idle
    start = time.monotonic()
    deadline = start + rank.args.soak
    while rank.sharers.communicator.greatest([int(time.monotonic() < deadline)]) == [1]:
        for _ in range(64):
            if draws.random() < 0.02 * (1 + rank.number):
                prompt = [draws.randrange(400) + 5 for _ in range(draws.randrange(3, 60))]
                engine.add_request(f"soak {number}", prompt, params, stream=False)
                number += 1
            ended += sum(one.finish_reason is not None for one in engine.step())
    while rank.is_busy(engine):
        for _ in range(CHUNK):
            ended += sum(one.finish_reason is not None for one in engine.step())
    replays = 0 if rounds is None else rounds.counters["replays"]
    engine.scheduler.check_invariant()
    line = f"{replays} rounds, {ended} of {number} requests ended, "
    rank.note(
        "soak", f"{time.monotonic() - start:.1f} s", line + f"{rank.sharers.num_idle - before} idle"
    )
    engine.close()


PARTS = (identity, speed, soak)


def work(args: argparse.Namespace) -> None:
    faulthandler.dump_traceback_later(args.hangs_after, exit=True)
    flags = {"device": args.device, "dp_size": 2, "enable_dp_attention": True}
    config = config_from_flags({**flags, "enable_symm_mem": args.symm_mem})
    if args.device == "cpu":
        torch.set_num_threads(1)
    parallel = config.parallel
    place = Meeting(args.folder, args.rank, parallel.dp_size)
    sharers = meet(place, resolve_device(config.model.device), config.sums_in_one_kernel)
    rank = Rank(args.rank, Path(args.folder) / str(args.rank), args, {}, sharers)
    rank.folder.mkdir()
    for part in PARTS:
        if part.__name__ in args.parts:
            start = time.perf_counter()
            part(rank)
            rank.note("seconds", part.__name__, round(time.perf_counter() - start, 1))
    sys.stdout.flush()
    os._exit(0)  # a group of NCCL is never destroyed


def main() -> None:
    parser = argparse.ArgumentParser()
    parts = [one.__name__ for one in PARTS]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="qwen3-30b-a3b-shape", help="built in, or of shapes.py")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--specs", nargs="+", default=[*SPECS], help="of the identity")
    parser.add_argument("--hangs-after", type=float, default=120.0, help="seconds without a line")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--symm-mem", action="store_true", help="--enable-symm-mem")
    parser.add_argument("--kinds", type=int, default=2, help="of drafts that are timed: 1 is none")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--soak", type=float, default=10.0, help="seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help="used by the script itself")
    parser.add_argument("--folder")
    args = parser.parse_args()
    if args.rank is not None:
        work(args)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--folder", folder, "--rank"]
        processes = [
            subprocess.Popen(
                [*command, str(rank)], env={**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)}
            )
            for rank in range(2)
        ]
        while all(one.poll() is None for one in processes):
            time.sleep(0.1)
        time.sleep(2.0)
        for one in processes:
            if one.poll() is None and any(two.poll() for two in processes):
                one.kill()
        print("codes", [one.wait() for one in processes], flush=True)
        paths = [Path(folder, str(rank), f"rank{rank}.json") for rank in range(2)]
        found = {path.stem: json.loads(path.read_text()) for path in paths if path.is_file()}
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
