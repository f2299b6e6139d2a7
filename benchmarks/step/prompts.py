"""Prompt tokens a second of the engine, plain and with an EAGLE-3 draft of random weights, of one
tree or of two in turns; and what one prompt's forward consists of, kernel by kernel.

    python benchmarks/step/prompts.py llama-3.1-8b-shape --old ../main
    python benchmarks/step/prompts.py smollm2-shape --profile OUT --engines plain:8192 plain:8448

Token ids that all differ, one token out. A process of each tree stays, and runs a batch whenever it
is told to. --profile: kernels, and the gaps between them, into kernels.txt of this folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import report
from tree_process import TreeProcess

HERE = Path(__file__).resolve()
NOTES = """
tok/s: of all prompts, until the device has done everything, what a drafter reads included; ms: to
the last first token. Medians; the ratio is the median of the turns' ratios. Prompts come together,
after the prefix cache was emptied.
"""
MOST_GAP = 20.0  # microseconds between kernels, above which a gap is listed by itself


class Worker:
    """Engines of one tree, by --engines."""

    def __init__(self, args: argparse.Namespace) -> None:
        from specengine.cli.bench import throughput
        from specengine.core.config import SpecConfig
        from specengine.engine.build import build_engine, load
        from specengine.engine.phases import Phases
        from specengine.lab.throughput.plan import prepare

        parser = argparse.ArgumentParser()
        throughput.add_arguments(parser)
        given = [args.model, "--load-format", "dummy", "--random-draft", str(args.draft_vocab)]
        given += ["--speculative-num-steps", "3", "--max-total-tokens", str(args.slots)]
        given += ["--speculative-simulate-accept-length", "2.5", "--max-running-requests", "64"]
        given += ["--batch-sizes", "8", "--prompt-len", "1024", "--new-tokens", "4"]
        self.stack = ExitStack()
        config = prepare(throughput.plan_of(parser.parse_args(given)), self.stack)
        loaded = load(config, Phases())
        self.vocab_size = min(loaded.model.vocab_size, 2000)
        self.engines: dict[str, Any] = {}
        for name in args.engines:
            kind, _, chunk = name.partition(":")
            schedule = replace(config.schedule, chunked_prefill_size=int(chunk) if chunk else None)
            spec = config.spec if kind == "eagle3" else SpecConfig()
            mode = "none" if kind == "eager" else config.graph.cuda_graph_mode
            graph = replace(config.graph, cuda_graph_mode=mode)
            made = replace(config, schedule=schedule, spec=spec, graph=graph)
            self.engines[name] = build_engine(made, loaded, Phases())
        self.rng = random.Random(0)

    def run(self, name: str, length: int, count: int) -> dict[str, Any]:
        """first: seconds to the last first token; all: until the device has done everything."""
        import torch

        from specengine.core.sampling import SamplingParams

        engine = self.engines[name]
        prompts = [self.rng.choices(range(self.vocab_size), k=length) for _ in range(count)]
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.flush_cache()
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        synchronize()
        start = perf_counter()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params, stream=False)
        while engine.has_work:
            engine.step()
        first = perf_counter() - start
        synchronize()
        return {"first": first, "all": perf_counter() - start}

    def profile(self, name: str, length: int, count: int, file: Path) -> dict[str, Any]:
        import torch

        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CUDA, kinds.CPU]) as profile:
            took = self.run(name, length, count)
        trace = file.with_suffix(".trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        trace.unlink()
        text = kernel_table(events)
        with file.open("a") as out:
            out.write(f"{name}, {count} x {length} tokens, {took}\n{text}\n\n")
        return took


def kernel_table(events: list[dict[str, Any]]) -> str:
    """Microseconds by kernel; gaps by what stands behind them; long gaps with what the host did."""
    device = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = [one for one in events if one.get("ph") == "X" and one.get("cat") in device]
    spans.sort(key=lambda one: float(one["ts"]))
    calls = [
        one
        for one in events
        if one.get("ph") == "X" and one.get("cat") in ("cuda_runtime", "cuda_driver")
    ]
    if not spans:
        return "no kernels"
    found: dict[str, list[float]] = defaultdict(list)
    gaps: dict[str, list[float]] = defaultdict(list)
    long, end, begin = [], float(spans[0]["ts"]), float(spans[0]["ts"])
    busy, before = 0.0, ""
    for one in spans:
        start, took = float(one["ts"]), float(one["dur"])
        found[one["name"]].append(took)
        gap = start - end
        if gap > 0:
            gaps[one["name"]].append(gap)
        if gap > MOST_GAP:
            waits = [c for c in calls if float(c["ts"]) < start and float(c["ts"]) + c["dur"] > end]
            slow = sorted(waits, key=lambda c: -c["dur"])[:3]
            said = ", ".join(f"{c['name']} {c['dur']:.0f}" for c in slow)
            long.append(
                f"  {gap:8.1f} at {end - begin:9.1f}: {before[:40]} -> {one['name'][:40]}; {said}"
            )
        busy += max(0.0, start + took - max(start, end))
        end, before = max(end, start + took), one["name"]
    first_call = min((float(c["ts"]) for c in calls), default=begin)
    lines = [
        f"span {end - begin:.0f} us, busy {busy:.0f}, gaps {end - begin - busy:.0f}, "
        f"first call {begin - first_call:.0f} before the first kernel, {len(spans)} launches",
    ]
    for name, took in sorted(found.items(), key=lambda pair: -sum(pair[1])):
        behind = sum(gaps[name])
        lines.append(
            f"{sum(took):10.0f} us {len(took):5} x {median(took):8.2f} (gaps before "
            f"{behind:7.0f})  {name[:150]}"
        )
    return "\n".join([*lines, f"gaps above {MOST_GAP:g} us:", *long])


class Side(TreeProcess):
    """The worker of one tree."""

    def __init__(self, tree: Path, args: argparse.Namespace, log: Path) -> None:
        command = [sys.executable, str(HERE), args.model, "--worker", "--slots", str(args.slots)]
        command += ["--draft-vocab", str(args.draft_vocab), "--engines", *args.engines]
        super().__init__(tree, command, log)

    def wait(self) -> list[str]:
        names: list[str] = self.read()["engines"]
        return names


def work(args: argparse.Namespace) -> None:
    """The process of one side: lines of JSON in and out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    worker = Worker(args)
    print(json.dumps({"engines": [*worker.engines]}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        file = asked.pop("file", None)
        took = worker.profile(**asked, file=Path(file)) if file else worker.run(**asked)
        print(json.dumps(took), file=answers, flush=True)


def compare(sides: list[Side], names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for length, count in (map(int, one.split("x")) for one in args.batches):
        for name in names:
            for side in sides:
                side.run(name=name, length=length, count=count)
        taken: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
        end, turn = monotonic() + args.seconds, 0
        while turn < 2 or monotonic() < end:
            order = range(len(sides)) if turn % 2 else reversed(range(len(sides)))
            for place in order:
                for name in names if turn % 2 else reversed(names):
                    took = sides[place].run(name=name, length=length, count=count)
                    taken[place, name].append(took)
            turn += 1
        for name in names:
            row: dict[str, Any] = {
                "engine": name,
                "tokens": length,
                "prompts": count,
                "turns": turn,
            }
            for place in range(len(sides)):
                label = ("new", "old")[place]
                runs = taken[place, name]
                row[f"{label}, tok/s"] = length * count / median(one["all"] for one in runs)
                row[f"{label}, ms"] = 1000 * median(one["first"] for one in runs)
            if len(sides) > 1:
                pairs = zip(taken[0, name], taken[1, name], strict=True)
                row["new / old"] = median(old["all"] / new["all"] for new, old in pairs)
            rows.append(row)
            print(
                {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()},
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--old", type=Path, help="the tree of another commit, in turns with this")
    parser.add_argument("--draft-vocab", type=int, default=32000)
    parser.add_argument("--slots", type=int, default=66560, help="tokens of KV of each engine")
    parser.add_argument("--batches", nargs="+", default=["7900x8", "7900x1", "1024x8", "1024x1"])
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["plain", "eagle3"],
        metavar="KIND[:CHUNK]",
        help="plain, eager (plain without graphs) or eagle3, perhaps with a --chunked-prefill-size",
    )
    parser.add_argument("--seconds", type=float, default=4, help="of each size of batch")
    parser.add_argument("--profile", type=Path, metavar="DIR")
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    trees = [HERE.parents[2], *([args.old.resolve()] if args.old else [])]
    sides = [Side(tree, args, args.logs / f"prompts-{n}.log") for n, tree in enumerate(trees)]
    names, *_ = [side.wait() for side in sides]
    try:
        rows = compare(sides, names, args)
        title = "Prompt tokens a second, by turns"
        print(report.write("long-prompts", "prompts-in-turns", title, rows, NOTES))
        if args.profile:
            args.profile.mkdir(parents=True, exist_ok=True)
            for name in names:
                for length, count in ((7900, 2), (1024, 1)):
                    file = args.profile / "kernels.txt"
                    sides[0].run(name=name, length=length, count=count, file=str(file))
    finally:
        for side in sides:
            side.close()


if __name__ == "__main__":
    main()
