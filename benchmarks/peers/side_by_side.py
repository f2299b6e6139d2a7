"""vLLM and SGLang on one model, plain and with EAGLE-3: they start at once, and are measured one at
a time, so that a comparison takes one start and not four.

    python benchmarks/peers/side_by_side.py --model llama-3.1-8b-shape --sglang PY --vllm PY \
        --eagle3 --out OUT --tp-size 2 --new-tokens 128

All must fit on the cards together: --at-once says how many start together, and each gets KV for
--tokens alone. OUT gets NAME.json and NAME.log of each: sglang, vllm, sglang-eagle3, vllm-eagle3.
Status 1: one failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from turns import GO, is_up

HERE = Path(__file__).resolve().parent
PEERS = ("sglang", "vllm")
PASSED_ON = ("tp-size", "batch-sizes", "prompt-len", "new-tokens", "repeats", "first-token")
_EACH = 0.1  # seconds
# SGLang refuses cards of unequal free memory: others load there, now on one card, now on the other.
_BESIDE_OTHERS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}


@dataclass(frozen=True)
class Run:
    """command: writes OUT/name.json, and takes --turns FOLDER."""

    name: str
    command: list[str]


def peer_runs(
    out: Path,
    pythons: dict[str, str],
    words: Sequence[str],
    eagle3: Sequence[str],
    options: Sequence[str] = (),
    label: str = "",
    mtp: Sequence[str] = (),
) -> Iterator[Run]:
    """pythons: an interpreter by peer. words: of both scripts. eagle3, mtp: words of those runs
    alone; none: no such run. options: PEER:NAME=JSON. label: behind each name."""
    for name, python in pythons.items():
        command = [python, str(HERE / f"{name}_throughput.py"), *words]
        for one in options:
            peer, _, option = one.partition(":")
            command += ["--option", option] if peer == name else []
        plain = f"{name}{label}"
        for drafts, more in (("", []), ("-eagle3", eagle3), ("-mtp", mtp)):
            title = plain + drafts
            if more or not drafts:
                yield Run(title, [*command, *more, "--json", str(out / f"{title}.json")])


def run_together(runs: Sequence[Run], out: Path, starting: float, limit: float) -> list[str]:
    """Start all, let each be measured when all are up or have ended, and end what is left after
    `limit` seconds. starting: seconds after which those that are not up are ended, as they would
    load while others are measured. Returns the names of those that failed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="turns-") as name:
        folder = Path(name)
        processes = {one.name: _started(one, folder, out) for one in runs}
        try:
            while (past := time.monotonic() - begun) < limit:
                left = [one for one in processes.values() if one.poll() is None]
                if not left:
                    break
                late = [one for one in left if not is_up(folder, one.pid)]
                if past > starting:
                    _end(late)
                if not late:
                    (folder / GO).touch()
                time.sleep(_EACH)
        finally:
            _end([*processes.values()])
    print(f"{', '.join(processes)}: {time.monotonic() - begun:.0f} s", flush=True)
    return [name for name, one in processes.items() if one.returncode]


def run_in_waves(
    runs: Sequence[Run], at_once: int, out: Path, starting: float, limit: float
) -> int:
    """`run_together` for so many at once. The status of the script: 1 where one failed, which is
    told."""
    failed: list[str] = []
    for first in range(0, len(runs), at_once):
        failed += run_together(runs[first : first + at_once], out, starting, limit)
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """With all that they started."""
    for one in processes:
        with suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()


def _started(run: Run, turns: Path, out: Path) -> subprocess.Popen[bytes]:
    with (out / f"{run.name}.log").open("wb") as log:
        return subprocess.Popen(
            [*run.command, "--turns", str(turns)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | _BESIDE_OTHERS,
        )


def share_of_memory(at_once: int, tokens: int, token_bytes: int) -> list[str]:
    """Options, as of `peer_runs`. Both engines take free memory for theirs while they start, and
    others take of it then: so SGLang is given a number of tokens, and vLLM bytes. vLLM asks at
    its start that its share is free, too."""
    return [
        f"sglang:max_total_tokens={tokens}",
        f"vllm:kv_cache_memory_bytes={tokens * token_bytes}",
        f"vllm:gpu_memory_utilization={0.8 / at_once:.2f}",
    ]


def add_option_of(parser: argparse.ArgumentParser) -> None:
    """Options, as of `peer_runs`."""
    parser.add_argument(
        "--option-of",
        action="append",
        default=[],
        metavar="PEER:NAME=JSON",
        help="of a peer's engine",
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    words = ["--model", args.model]
    for name in PASSED_ON:
        given = getattr(args, name.replace("-", "_"))
        words += [f"--{name}", *map(str, given)] if given else []
    drafts = ["--algorithm", "EAGLE3", "--random-draft", str(args.draft_vocab)]
    memory = share_of_memory(args.at_once, args.tokens, args.token_bytes)
    pythons = {name: python for name in PEERS if (python := getattr(args, name))}
    eagle3 = drafts if args.eagle3 else []
    runs = [*peer_runs(args.out, pythons, words, eagle3, [*memory, *args.option_of])]
    if args.only:
        runs = [one for one in runs if one.name in args.only]
    # Runs of one kind take about as long to start: plain ones first.
    runs.sort(key=lambda one: one.name.endswith("-eagle3"))
    return run_in_waves(runs, args.at_once, args.out, args.starting, args.limit)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a built-in shape, or a folder")
    for name in PEERS:
        parser.add_argument(f"--{name}", metavar="PY", help="the interpreter that has it")
    parser.add_argument("--eagle3", action="store_true", help="each with EAGLE-3 as well")
    parser.add_argument("--draft-vocab", type=int, default=32000, help="tokens of the draft")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these runs alone")
    parser.add_argument("--at-once", type=int, default=4, help="how many start together")
    parser.add_argument("--tokens", type=int, default=32768, help="KV of each engine")
    parser.add_argument(
        "--token-bytes", type=int, default=1 << 17, help="KV of a token on a card (8B: 128 KiB)"
    )
    parser.add_argument("--starting", type=float, default=200, help="seconds to be up in")
    parser.add_argument("--limit", type=float, default=300, help="seconds of those at once")
    add_option_of(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    for name in PASSED_ON:
        parser.add_argument(f"--{name}", type=int, nargs="+", help="of the engines' scripts")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
