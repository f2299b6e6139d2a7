"""EAGLE-3 training in several processes beside one, and a run of several that was stopped.

    python benchmarks/training/several_processes.py data/tiny --processes 2 --steps 40

Four runs over the same data: one process that accumulates so many forwards; the processes with one
forward each, twice, which tells how far two equal runs come apart; and the processes going on from
the checkpoint in the middle. On GPUs that is NCCL, elsewhere gloo. Data that is not there is made
first: what `tiny` writes in a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

OPTIONS = ("run.log_every=1", "run.probe_every=0", "run.keep=9", "schedule.warmup_steps=10")


def train(args: argparse.Namespace, output: Path, processes: int, resume: bool = False) -> float:
    """-> seconds, start and end included."""
    start = [sys.executable, "-m", "specengine"]
    if processes > 1:
        one_host = ["--standalone", f"--nproc-per-node={processes}"]
        start = [sys.executable, "-m", "torch.distributed.run", *one_host, "-m", "specengine"]
    options = [
        f"data.path={args.data}",
        f"data.batch_tokens={args.batch_tokens}",
        f"optimiser.accumulate={args.processes}",
        f"schedule.max_steps={args.steps}",
        f"run.save_every={args.steps // 2}",
        f"run.eval_every={args.steps // 2}",
        f"run.output={output}",
        f"run.resume={str(resume).lower()}",
        *OPTIONS,
        *args.override,
    ]
    begin = time.monotonic()
    with (args.logs / f"{output.name}{'-again' if resume else ''}.txt").open("w") as log:
        command = [*start, "train", "eagle3", args.recipe, *options]
        subprocess.run(command, stdout=log, stderr=log, env=os.environ, check=True)
    return time.monotonic() - begin


def losses(output: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def tokens_per_second(output: Path) -> float:
    """Over the second half, in which nothing is compiled."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    first, last = steps[len(steps) // 2], steps[-1]
    return float((last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"]))


def weights(output: Path) -> dict[str, Tensor]:
    return load_file(output / "export" / "model.safetensors")


def compare(name: str, one: Path, other: Path) -> dict[str, Any]:
    apart = [
        abs(a - b) / a
        for (step, a), (same, b) in zip(losses(one), losses(other), strict=True)
        if step == same
    ]
    mine, theirs = weights(one), weights(other)
    differences = [
        float((mine[key].float() - theirs[key].float()).norm() / mine[key].float().norm())
        for key in mine
    ]
    return {
        "runs": name,
        "steps": len(apart),
        "last loss": losses(one)[-1][1],
        "and the other's": losses(other)[-1][1],
        "largest difference of a loss": f"{max(apart):.2g}",
        "of a weight tensor": f"{max(differences):.2g}",
        "same bits": all(torch.equal(mine[key], theirs[key]) for key in mine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--recipe", default="tiny-eagle3")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--override", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--name", default="training-several-processes")
    parser.add_argument("--logs", type=Path, default=Path())
    args = parser.parse_args()
    if not args.data.exists():
        make = ["data", "make", "tiny", "--out", str(args.data), "--max-minutes", "1"]
        subprocess.run([sys.executable, "-m", "specengine", *make], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        one, two, twin, stopped = (Path(scratch) / name for name in ("one", "two", "twin", "half"))
        seconds = {"one": train(args, one, 1), "several": train(args, two, args.processes)}
        shutil.copytree(two, stopped)
        (stopped / "checkpoints" / f"step-{args.steps:08d}.pt").unlink()
        shutil.rmtree(stopped / "export")
        with ThreadPoolExecutor() as side_by_side:  # they are not timed
            others = [
                side_by_side.submit(train, args, twin, args.processes),
                side_by_side.submit(train, args, stopped, args.processes, resume=True),
            ]
            for other in others:
                other.result()
        rows = [
            compare(f"one process, {args.processes} processes", one, two),
            compare(f"{args.processes} processes, twice", two, twin),
            compare(f"{args.processes} processes, and stopped in the middle", two, stopped),
        ]
        rates = {name: tokens_per_second(path) for name, path in (("one", one), ("several", two))}
    notes = (
        f"{args.processes} processes (FSDP2) of one forward of {args.batch_tokens} tokens a step "
        f"each; one process accumulates as many. Differences are relative; a tensor's is that of "
        f"its norm. After the first half, one process learned {rates['one']:.0f} tokens/s and "
        f"{args.processes} together {rates['several']:.0f}; whole runs took {seconds['one']:.0f} "
        f"and {seconds['several']:.0f} s."
    )
    title = "EAGLE-3 training in several processes"
    print(
        json.dumps(rows, indent=1), notes, report.write("training", args.name, title, rows, notes)
    )


if __name__ == "__main__":
    main()
