"""How long weights take from files to a model, of this commit beside an old one, in turns.

    python benchmarks/peers/checkpoint.py qwen3-30b-a3b-shape DIR
    git archive dcb17d5 | tar x -C OLD
    python benchmarks/step/load_weights.py DIR --old OLD --tp-size 1 2 --repeats 3

Files that half of the memory holds are read once before, so that no run reads a disk. On a CPU, the
forms that it multiplies fastest are most of the time: --unpacked leaves them out, as a GPU does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PHASE = "load weights"


def load_once(args: argparse.Namespace) -> dict[str, float]:
    """In a process of its own: seconds, and of this process page faults and memory. They are those
    of loading alone, but for the greatest memory."""
    tp_size = args.tp_size[0]
    flags = {"model": args.model, "device": args.device, "dtype": "bfloat16", "tp_size": tp_size}
    load = _unpacked(flags, args.rank) if args.unpacked else _as_served(flags)
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = load()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "faults": after.ru_minflt - before.ru_minflt,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "peak_gb": after.ru_maxrss * 1024 / 1e9,
    }


def _as_served(flags: dict[str, Any]) -> Callable[[], float]:
    """The phase of a start, on rank 0 of all ranks."""
    from specengine.core.config_sources import config_from_flags
    from specengine.engine.build import load
    from specengine.engine.parallel.ranks import start_ranks
    from specengine.engine.phases import Phases

    config, phases = config_from_flags(flags), Phases()
    link = start_ranks(config, phases)

    def run() -> float:
        load(config, phases, link)
        return phases.seconds[PHASE]

    return run


def _unpacked(flags: dict[str, Any], rank: int) -> Callable[[], float]:
    """What one rank of several does, which run in processes of their own and do not meet."""
    import torch

    from specengine.core.config import ModelConfig
    from specengine.core.parallel import Alone, split_over
    from specengine.runner.loader.load import load_model
    from specengine.runner.loader.source import resolve_model
    from specengine.target.registry import find_model_class

    source = resolve_model(ModelConfig(model=flags["model"]))
    place = Alone()
    place.rank, place.size = rank, flags["tp_size"]

    def run() -> float:
        begun = perf_counter()
        with split_over(place):
            device = torch.device(flags["device"])
            load_model(source, find_model_class, torch.bfloat16, device, packs=False)
        return perf_counter() - begun

    return run


def in_turns(args: argparse.Namespace) -> list[dict[str, Any]]:
    trees = {"before": args.old, "now": ROOT} if args.old else {"now": ROOT}
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    for turn in range(args.repeats):
        for tp_size in args.tp_size:
            for name, tree in trees.items():
                one = _in_processes(args, tree, tp_size)
                print(f"turn {turn}, tp_size {tp_size}, {name}: {one}", flush=True)
                found.setdefault((tp_size, name), []).append(one)
    return [_row(tp_size, name, runs, found) for (tp_size, name), runs in found.items()]


def _in_processes(args: argparse.Namespace, tree: Path, tp_size: int) -> dict[str, float]:
    """The slowest rank's, where each is a process."""
    command = [sys.executable, __file__, args.model, "--device", args.device]
    command += ["--once", "--tp-size", str(tp_size)]
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"}
    ranks = [["--unpacked", "--rank", str(rank)] for rank in range(tp_size)]
    given: dict[str, Any] = {"env": environment, "cwd": tree, "stdout": subprocess.PIPE}
    running = [
        subprocess.Popen([*command, *more], **given) for more in (ranks if args.unpacked else [[]])
    ]
    printed = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"{tree}: a load failed")
    made: list[dict[str, float]] = [json.loads(text.splitlines()[-1]) for text in printed]
    return max(made, key=lambda one: one["seconds"])


def _row(
    tp_size: int, name: str, runs: list[dict[str, float]], every: dict[Any, list[dict[str, float]]]
) -> dict[str, Any]:
    first = every.get((tp_size, "before"), runs)
    pairs = zip(first, runs, strict=True)
    return {
        "ranks": tp_size,
        "commit": name,
        "s": median(one["seconds"] for one in runs),
        "least s": min(one["seconds"] for one in runs),
        "times as fast, in turns": median(old["seconds"] / one["seconds"] for old, one in pairs),
        "user s": median(one["user"] for one in runs),
        "system s": median(one["system"] for one in runs),
        "page faults": median(one["faults"] for one in runs),
        "peak memory, GB": max(one["peak_gb"] for one in runs),
    }


def _read_files(folder: Path) -> None:
    if not folder.is_dir():
        return
    files = sorted(folder.glob("*.safetensors"))
    if sum(path.stat().st_size for path in files) < os.sysconf("SC_PHYS_PAGES") * 2048:
        for path in files:
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", help="a directory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tp-size", type=int, nargs="+", default=[1])
    parser.add_argument("--old", type=Path, help="the tree of another commit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="load, and print a line of JSON")
    parser.add_argument("--unpacked", action="store_true", help="no forms of a CPU")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--table", default="load-weights", help="its name on the page start-up")
    parser.add_argument("--notes", default="")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(load_once(args)))
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import report

    _read_files(Path(args.model))
    rows = in_turns(args)
    title = "Weights from files to a model"
    print(report.write("start-up", args.table, title, rows, args.notes))


if __name__ == "__main__":
    main()
