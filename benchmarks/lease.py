"""Run a plan of measurements on a machine that is there for a limited time: several side by side,
each with cards, a log and a folder of its own.

    python benchmarks/lease.py benchmarks/plans/round.yaml --out OUT --seconds 560 --old OLD
    python benchmarks/lease.py benchmarks/plans/*.yaml --dry    # are the commands right?

OUT/results.tar.xz holds what the jobs wrote. It is made again each minute and at the end, where it
becomes results.tar.xz.0, .1 … if it is larger than 15 MiB; nothing else lies there. A plan is a
list of jobs: benchmarks/jobs/plan.py says what each has, and benchmarks/README.md how a lease is
run. Status 1: a job failed, or was ended at its limit.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TREE))

from benchmarks.jobs.archive import pack, parts_of  # noqa: E402
from benchmarks.jobs.check import problem_of  # noqa: E402
from benchmarks.jobs.plan import Job, PlanError, on_cards, read_plan, why_not  # noqa: E402
from benchmarks.jobs.processes import Machine  # noqa: E402
from benchmarks.jobs.run import GRACE, Lease, summary  # noqa: E402
from benchmarks.jobs.schedule import Schedule  # noqa: E402

ARCHIVE = "results.tar.xz"
PACKING = 10.0  # seconds that are kept for the last archive
EACH = 60.0  # seconds between archives
TICK = 0.2


def main() -> int:
    args = parse_args()
    try:
        plans = {path: read_plan(path) for path in args.plans}
    except PlanError as error:
        sys.exit(f"error: {error}")
    if args.dry:
        return dry([(path, job) for path, jobs in plans.items() for job in jobs])
    jobs = on_cards([job for found in plans.values() for job in found], len(args.cards))
    names = [one.name for one in jobs]
    if twice := {name for name in names if names.count(name) > 1}:
        sys.exit(f"error: the plans share names of jobs: {', '.join(sorted(twice))}")
    if unknown := set(args.only or names) - set(names):
        sys.exit(f"error: --only {' '.join(sorted(unknown))}: no such job; {', '.join(names)}")
    return run(args, [one for one in jobs if not args.only or one.name in args.only])


def run(args: argparse.Namespace, jobs: list[Job]) -> int:
    begun = time.monotonic()
    folder = args.work or Path(tempfile.mkdtemp(prefix="lease-"))
    kept = folder / "jobs"
    kept.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    machine = Machine(TREE, folder, args.site, values_of(args))
    deadline = begun + args.seconds - GRACE - PACKING
    with (kept / "lease.txt").open("a") as file:
        say = partial(_say, file, begun)
        memory = [args.memory.get(card, 0.0) for card in args.cards]
        reasons = [why_not(job, machine.values, memory, _paths(args)) for job in jobs]
        ready = [job for job, reason in zip(jobs, reasons, strict=True) if reason is None]
        schedule = Schedule(ready, args.cards, deadline, args.without_cards)
        lease = Lease(schedule, machine.launch, time.monotonic, say)
        for job, reason in zip(jobs, reasons, strict=True):
            if reason is not None:
                lease.leave_out(job, reason)
        until_done(lease, lambda: pack(kept, args.out / ARCHIVE))
        for line in summary(lease.outcomes):
            say(line)
    pack(kept, args.out / ARCHIVE)
    print("packed:", *parts_of(args.out / ARCHIVE), flush=True)
    if args.work is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if any(one.status in ("failed", "limit") for one in lease.outcomes) else 0


def until_done(lease: Lease, keep: Callable[[], Any]) -> None:
    """keep: called each minute. SIGTERM and Ctrl-C end the jobs, but only after the step that runs:
    a process that is just being started would be lost."""
    cut: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, _: cut.append(caught))
    packed = time.monotonic()
    while lease.step():
        time.sleep(TICK)
        if cut:
            lease.cut()
        elif time.monotonic() > packed + EACH:
            keep()
            packed = time.monotonic()


def dry(jobs: list[tuple[Path, Job]]) -> int:
    """Whether every command exists and parses."""
    bad = 0
    for path, job in jobs:
        problem = problem_of(job, TREE)
        bad += problem is not None
        print(f"{path.stem} {job.name}: {problem or 'ok'}", flush=True)
    return 1 if bad else 0


def _say(file: Any, begun: float, line: str) -> None:
    text = f"{time.monotonic() - begun:6.1f} s  {line}"
    print(text, flush=True)
    print(text, file=file, flush=True)


def _paths(args: argparse.Namespace) -> list[str]:
    return [str(TREE), *map(str, args.site), *sys.path]


def values_of(args: argparse.Namespace) -> dict[str, str]:
    given = {"python": sys.executable, **dict(one.split("=", 1) for one in args.set)}
    return given if args.old is None else {**given, "old": str(args.old.resolve())}


def cards_here() -> dict[str, float]:
    """GiB of this machine's GPUs, by their numbers."""
    asked = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return {}
    lines = (line.split(", ") for line in done.stdout.splitlines() if not done.returncode)
    return {number: float(mebibytes) / 1024 for number, mebibytes in lines}


def _pair(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text}: NAME=VALUE")
    return text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("plans", nargs="+", type=Path, metavar="PLAN.yaml")
    parser.add_argument("--out", type=Path, help="folder of results.tar.xz")
    parser.add_argument("--seconds", type=float, default=560, help="until all is packed")
    parser.add_argument("--cards", nargs="*", help="numbers of GPUs; default: all of the machine")
    parser.add_argument("--old", type=Path, help="{old}: a tree of an old commit")
    parser.add_argument(
        "--set", nargs="+", default=[], type=_pair, metavar="NAME=VALUE", help="of {NAME}"
    )
    parser.add_argument(
        "--site", nargs="+", default=[], type=Path, help="folders of packages, behind the tree"
    )
    parser.add_argument("--only", nargs="+", metavar="JOB", help="these jobs alone")
    parser.add_argument("--without-cards", type=int, default=2, help="jobs of no card at a time")
    parser.add_argument("--work", type=Path, help="keep the jobs' folders here")
    parser.add_argument("--dry", action="store_true", help="check the commands; run nothing")
    args = parser.parse_args()
    if args.out is None and not args.dry:
        parser.error("--out DIR is needed, or --dry")
    args.memory = cards_here()
    args.cards = [*args.memory] if args.cards is None else args.cards
    return args


if __name__ == "__main__":
    sys.exit(main())
