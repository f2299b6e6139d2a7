"""One checkpoint of random weights, and the work of `bench throughput` on it in this engine, SGLang
and vLLM.

    python benchmarks/peers/same_weights.py qwen3-30b-a3b-shape --out OUT --sglang PY --vllm PY

Each engine that makes random weights itself makes others, and a mixture of experts then reads
others, too: here all read the same files. OUT gets a JSON file and a log a run: specengine (plain,
and with drafts of a forced accepted length), experts (how many experts a step reads; of one card
alone), sglang, vllm, and NAME-eagle3 and NAME-mtp of the peers that --eagle3 and --mtp name. In
this order, --at-once of
them start together, and are measured one at a time. --first-token N ...: the milliseconds to the
first token of one prompt of so many tokens, in place of that work, without drafts. A run that fails
is told, and holds up no other. The checkpoint is deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from checkpoint import (  # noqa: E402
    fields_of,
    first_layers,
    is_mtp_inside,
    mtp_shapes,
    num_bytes,
    published_shapes,
)
from side_by_side import (  # noqa: E402
    Run,
    add_option_of,
    peer_runs,
    run_in_waves,
    share_of_memory,
)

SHARED_MEMORY = Path("/dev/shm")
ENGINES = ("specengine", "sglang", "vllm")
NAMES = (*ENGINES, "experts", *(f"{one}-{by}" for one in ENGINES[1:] for by in ("eagle3", "mtp")))
DRAFT_VOCAB, ACCEPTED, STEPS = 32000, 2.5, 3
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of config.json
HEADROOM = 16 << 30  # bytes of memory that engines need beside files in shared memory


HERE = Path(__file__).resolve().parent
MODES = HERE.parent / "step/prefill_modes.py"
STARTING = 0.7  # of the limit may pass until all of a wave are up
ALL_BUT = 0.98  # of a card's memory: what others have on it counts


def runs(args: argparse.Namespace, folder: Path, mtp: Path | None) -> list[Run]:
    """In their order: those with drafts of the peers last."""
    found = [*own_runs(args, folder, mtp), *runs_of_peers(args, folder)]
    found = [one for one in found if not args.only or one.name in args.only]
    return sorted(found, key=lambda one: one.name.endswith(("-eagle3", "-mtp")))


def own_runs(args: argparse.Namespace, folder: Path, mtp: Path | None) -> Iterator[Run]:
    if args.first_token:
        lengths = ["--lengths", *map(str, args.first_token)]
        bench = [sys.executable, str(MODES), str(folder), "--load-format", "auto", *lengths]
        yield _run(args.out, "specengine", [*bench, "--modes", "auto"])
        return
    script = str(HERE / "specengine_throughput.py")
    shared = ["--mem-fraction-static", str(ALL_BUT), "--max-total-tokens", str(args.tokens)]
    memory = shared if args.at_once > 1 else []
    bench = [sys.executable, script, str(folder), *words_of(args), *memory]
    bench += ["--tp-size", str(args.tp_size)]
    forced = ["--speculative-simulate-accept-length", str(ACCEPTED)]
    forced += ["--speculative-num-steps", str(STEPS), "--compare-plain"]
    if "specengine" in args.mtp:
        drafts = ["--speculative-algorithm", "MTP", "--speculative-draft-model-path", str(mtp)]
        bench += [*drafts, *forced]
    elif "specengine" in args.eagle3:
        bench += ["--random-draft", str(args.draft_vocab), *forced]
    yield _run(args.out, "specengine", bench)
    if args.tp_size == 1 and any(name in args.fields for name in COUNTS):
        sizes = ["--batch-sizes", *map(str, args.batch_sizes)]
        command = [sys.executable, str(HERE / "chosen_experts.py"), str(folder), *sizes, *memory]
        yield _run(args.out, "experts", command)


def runs_of_peers(args: argparse.Namespace, folder: Path) -> Iterator[Run]:
    words = ["--model", str(folder), *words_of(args), "--tp-size", str(args.tp_size)]
    forced = ["--accept-length", str(ACCEPTED), "--num-steps", str(STEPS)]
    eagle3 = ["--algorithm", "EAGLE3", "--random-draft", str(args.draft_vocab), *forced]
    layer = ["--algorithm", "MTP", *forced]
    memory = share_of_memory(args.at_once, args.tokens, args.token_bytes)
    for peer in ENGINES[1:]:
        if python := getattr(args, peer):
            more = eagle3 if peer in args.eagle3 else []
            mtp = layer if peer in args.mtp else []
            options = [*memory, *args.option_of]
            yield from peer_runs(args.out, {peer: python}, words, more, options, mtp=mtp)
        else:
            print(f"{peer}: left out, --{peer} names no interpreter", flush=True)


def words_of(args: argparse.Namespace) -> list[str]:
    """Of every engine."""
    sizes = ["--batch-sizes", *map(str, args.batch_sizes)]
    words = [*sizes, "--repeats", str(args.repeats), "--new-tokens", str(args.new_tokens)]
    return [*words, "--first-token", *map(str, args.first_token)] if args.first_token else words


def _run(out: Path, name: str, command: list[str]) -> Run:
    return Run(name, [*command, "--json", str(out / f"{name}.json")])


def room(size: int, given: Path | None) -> Path:
    """A folder where `size` bytes fit: the given one, else shared memory, else the temporary one.
    Raises SystemExit."""
    places = [SHARED_MEMORY, Path(tempfile.gettempdir())] if given is None else [given]
    free = {place: _free(place) for place in places if place.is_dir()}
    for place, left in free.items():
        if left >= 1.02 * size:
            return place
    found = ", ".join(f"{place} has room for {left / 1e9:.1f}" for place, left in free.items())
    found = found or f"{places[0]} does not exist"
    sys.exit(f"the checkpoint is {size / 1e9:.1f} GB, and {found}: name another place by --folder")


def _free(place: Path) -> int:
    """Bytes that files may take there; in shared memory not what engines need beside them."""
    free = shutil.disk_usage(place).free
    if place.resolve().is_relative_to(SHARED_MEMORY):
        free = min(free, max(_memory() - HEADROOM, 0))
    return free


def _memory() -> int:
    """Bytes of memory that this machine, or what contains this process, has left."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    left = next(int(one.split()[1]) << 10 for one in lines if one.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # none, or no limit ("max")
        most = int((group / "memory.max").read_text())
        left = min(left, most - int((group / "memory.current").read_text()))
    return left


@contextmanager
def new_folder(place: Path, name: str) -> Iterator[Path]:
    """Deleted afterwards. Its name is the same each time, as reports show it. Raises SystemExit
    where it is there already."""
    folder = place / f"same-weights-{name}"
    try:
        folder.mkdir()
    except FileExistsError:
        sys.exit(f"{folder} exists: delete it, unless another run uses it")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def finished(command: Sequence[str], limit: float) -> str | None:
    """Run it to its end, or for `limit` seconds; then end all that it started, so that the card is
    free. What went wrong; None where nothing did."""
    try:
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    except OSError as error:
        return str(error)
    try:
        status = process.wait(limit)
        return None if status == 0 else f"status {status}"
    except subprocess.TimeoutExpired:
        return f"ended after {limit:.0f} s, its limit"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    args.fields = fields_of(args.shape)
    if args.layers is not None:
        args.fields = first_layers(args.fields, args.layers)
    is_inside = is_mtp_inside(args.fields)
    if not is_inside and {*args.mtp} - {ENGINES[0]}:
        sys.exit(f"--mtp {' '.join(args.mtp)}: peers find the MTP layer of Qwen3-Next alone")
    args.draft_vocab = min(DRAFT_VOCAB, args.fields["vocab_size"])
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    shapes = published_shapes(args.fields)
    size = num_bytes(shapes) + (num_bytes(mtp_shapes(args.fields, shapes)) if args.mtp else 0)
    place = room(size, args.folder)
    name = Path(args.shape).stem if Path(args.shape).is_file() else args.shape
    with new_folder(place, name) as parent:
        model = parent / name
        mtp = None if not args.mtp else model if is_inside else parent / "mtp-layer"
        script = str(ROOT / "benchmarks/peers/checkpoint.py")
        write = [sys.executable, script, args.shape, str(model)]
        write += [] if mtp is None else ["--mtp", str(mtp)]
        write += [] if args.layers is None else ["--layers", str(args.layers)]
        if problem := _told("checkpoint", write, args.limit):
            sys.exit(f"the checkpoint could not be written: {problem}")
        starting = STARTING * args.limit
        return run_in_waves(runs(args, model, mtp), args.at_once, args.out, starting, args.limit)


def _told(name: str, command: Sequence[str], limit: float) -> str | None:
    print(f"{name}: starts", flush=True)
    begun = perf_counter()
    problem = finished(command, limit)
    print(f"{name}: {problem or 'done'}, {perf_counter() - begun:.0f} s", flush=True)
    return problem


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", help="a built-in shape, or a file like config.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--folder", type=Path, help="for the checkpoint; default: /dev/shm or the temporary one"
    )
    parser.add_argument("--sglang", metavar="PY", help="the interpreter that has it; default: none")
    parser.add_argument("--vllm", metavar="PY", help="the interpreter that has it; default: none")
    parser.add_argument(
        "--eagle3",
        nargs="*",
        choices=ENGINES,
        default=["specengine"],
        help="who also drafts with EAGLE-3 of random weights (default: specengine)",
    )
    parser.add_argument(
        "--mtp",
        nargs="*",
        choices=ENGINES,
        default=(),
        help="who also drafts with an MTP layer (without a name: specengine), in place of EAGLE-3 "
        "here; the peers, of Qwen3-Next alone",
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these runs alone")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument(
        "--first-token", type=int, nargs="+", metavar="N", help="time prompts of so many tokens"
    )
    parser.add_argument("--tp-size", type=int, default=1, help="cards that share the model")
    parser.add_argument(
        "--at-once", type=int, default=1, help="runs that start together; all must fit on the card"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="KV of each, of several at once")
    parser.add_argument(
        "--token-bytes", type=int, default=96 << 10, help="KV of a token on a card (30B: 96 KiB)"
    )
    parser.add_argument("--limit", type=float, default=240, help="seconds of those at once")
    parser.add_argument("--layers", type=int, help="the first ones of the shape alone")
    add_option_of(parser)
    args = parser.parse_args(argv)
    if args.mtp == []:
        args.mtp = ENGINES[:1]
    if args.first_token and (args.mtp or {*args.eagle3} - {ENGINES[0]} or args.tp_size > 1):
        parser.error("--first-token: prompts are timed without drafts, on one card")
    return args


if __name__ == "__main__":
    sys.exit(main())
