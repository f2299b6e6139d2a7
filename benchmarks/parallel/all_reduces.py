"""The sum over two GPUs and its addition to the residual stream, by the rows of a round: that of
NCCL, of PyTorch's one-shot kernel (both with an addition of their own), and that of
specengine.kernels.ranks, which --enable-symm-mem takes.

    NCCL_NVLS_ENABLE=0 python benchmarks/parallel/all_reduces.py --out $OUT/all_reduces.json

    NCCL_NVLS_ENABLE=0 python benchmarks/parallel/all_reduces.py --only-forms --out $OUT/forms.json

The forms in which the last one's data travel are timed too, at larger sizes, in the same processes
(with `--only-forms` nothing else is): in words, and bare with 1, 2 and 4 chunks a thread.

Needs no model. Each is captured, 64 in a graph: alone, and behind the product of one row with half
of an 8B model's output projection. Whether each gives NCCL's bits is looked at in every replay,
beside products of the same stream. Ends with 1 where a rank has failed, or a sum is another.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._C._distributed_c10d import FileStore  # noqa: E402

from benchmarks.parallel.on_ranks import seconds_of_many  # noqa: E402
from specengine.core.platform import platform_of  # noqa: E402
from specengine.kernels.linear import few_row  # noqa: E402
from specengine.kernels.ranks import pair_sum  # noqa: E402
from specengine.kernels.ranks.pair_sum import PairSum  # noqa: E402
from specengine.runner.capture import capture  # noqa: E402
from specengine.runner.communicators.mapped_memory import MappedMemory  # noqa: E402
from specengine.runner.communicators.one_shot import (  # noqa: E402
    OneShotCommunicator,
    OwnKernel,
    PyTorchKernel,
)
from specengine.runner.communicators.torch_distributed import TorchCommunicator  # noqa: E402

WIDTHS = {"135M": 576, "8B": 4096, "70B": 8192}
ROWS = (1, 4, 8, 16, 32, 64)  # of which some are too many bytes for a kernel: NCCL's there
LARGE = (  # rows and width
    *((rows, WIDTHS["70B"]) for rows in (32, 64, 96, 128, 256)),
    (256, WIDTHS["8B"]),
)
FORMS = {  # the largest sum in words, in bytes, and the chunks of a thread of others
    "words": (pair_sum.LARGEST, pair_sum.BARE_CHUNKS),
    "bare, 1 chunk": (0, 1),
    "bare, 2 chunks": (0, 2),
    "bare, 4 chunks": (0, 4),
}
_REPLAYS = 50
_ROUNDS = 2  # of all forms by turns, of which the least time counts
Sum = Callable[[Tensor, Tensor], Tensor]  # of x over ranks, and stream + that


def ways(ranks: OneShotCommunicator) -> dict[str, Sum]:
    """By name. The last is what the engine takes."""

    def by_nccl(x: Tensor, stream: Tensor) -> Tensor:
        return stream + TorchCommunicator.all_reduce(ranks, x)

    other = PyTorchKernel(MappedMemory(ranks.store, ranks.rank, 2, ranks._group))
    other.allocate()
    ranks.greatest([0])  # both have
    other.map()
    found: dict[str, Sum] = {"NCCL": by_nccl, "PyTorch": other.add_up}
    name = "NCCL again" if ranks.kernel is None else ranks.kernel.name
    return found | {f"engine ({name})": ranks.all_reduce_add}


def measure(ranks: OneShotCommunicator) -> dict[str, Any]:
    """Microseconds."""
    found: dict[str, Any] = {"takes": None if ranks.kernel is None else ranks.kernel.name}
    all_ways = ways(ranks)
    for name, width in WIDTHS.items():
        for count in ROWS:
            x, stream = torch.zeros(2, count, width, dtype=torch.bfloat16, device="cuda")
            if not ranks._takes(x):
                continue
            row = {way: alone(add, x, stream) for way, add in all_ways.items()}
            found[f"{name} {count}"] = row
            say(ranks, f"{name:>5} {count:>4} rows: {row}")
    found["behind a product"] = behind_products(all_ways)
    say(ranks, f"behind a product: {found['behind a product']}")
    found["same"] = {
        f"{way} {dtype}": are_same(ranks, dtype, add)
        for dtype in (torch.bfloat16, torch.float32)
        for way, add in all_ways.items()
    }
    return found


def alone(add: Sum, x: Tensor, stream: Tensor) -> float:
    return round(seconds_of_many(lambda: add(x, stream)) * 1e6, 2)


def say(ranks: OneShotCommunicator, line: str) -> None:
    if ranks.rank == 0:
        print(line, flush=True)


def forms(ranks: OneShotCommunicator) -> dict[str, Sum]:
    """By name, each with a mailbox of its own: places in it depend on the form."""
    memory = MappedMemory(ranks.store, ranks.rank, 2, ranks._group)
    found: dict[str, Sum] = {}
    for name, given in FORMS.items():
        mailbox = memory.allocate(pair_sum.MAILBOX, torch.uint8)
        ranks.greatest([0])  # both have
        found[name] = PairSum(mailbox, memory.map(mailbox), *given)
    return found


def measure_forms(ranks: OneShotCommunicator) -> dict[str, Any]:
    """Microseconds by shape and form; and by form whether it has NCCL's bits."""
    all_forms = forms(ranks)
    same = {
        f"{form} {dtype}": are_same_large(ranks, dtype, add)
        for form, add in all_forms.items()
        for dtype in (torch.bfloat16, torch.float32)
    }
    say(ranks, f"forms have NCCL's bits: {same}")
    found: dict[str, Any] = {"same": same}
    for rows, width in LARGE:
        x, stream = torch.zeros(2, rows, width, dtype=torch.bfloat16, device="cuda")
        timed = [
            {form: alone(add, x, stream) for form, add in all_forms.items()} for _ in range(_ROUNDS)
        ]
        row = {form: min(one[form] for one in timed) for form in all_forms}
        found[f"{rows} x {width}"] = row
        say(ranks, f"{rows:>4} x {width} ({x.nbytes >> 10} KiB): {row}")
    return found


def are_same_large(ranks: OneShotCommunicator, dtype: torch.dtype, add: Sum) -> bool:
    """In a graph of sums of all large sizes, twice: blocks take part in turns of their own. Each
    replay has other numbers, and a rank is late."""
    own, both = (torch.Generator("cuda").manual_seed(seed) for seed in (5 + ranks.rank, 4))
    delays = random.Random(ranks.rank)
    sums = [torch.zeros(2, *one, dtype=dtype, device="cuda") for one in LARGE]
    sums = [one for one in sums if pair_sum.takes(one[0])]
    platform = platform_of(torch.device("cuda"))
    graph, out = capture(lambda: [add(*one) for one in sums * 2], None, platform)
    same = True
    for _ in range(_REPLAYS // 2):
        for one in sums:
            for part, makes in zip(one, (own, both), strict=True):
                part.copy_(torch.randn(part.shape, generator=makes, device="cuda"))
        by_nccl = [one[1] + TorchCommunicator.all_reduce(ranks, one[0].clone()) for one in sums]
        torch.cuda._sleep(int(delays.random() * 200_000))
        graph.replay()
        same &= all(torch.equal(a, b) for a, b in zip(out, by_nccl * 2, strict=True))
    return same


def behind_products(all_ways: dict[str, Sum]) -> dict[str, float]:
    """A product and the sum behind it, and the product with the addition alone. 16 weights by
    turns, so that none is in the cache."""
    weights = torch.zeros(16, 4096, 2048, dtype=torch.bfloat16, device="cuda")
    x = torch.zeros(1, 2048, dtype=torch.bfloat16, device="cuda")
    stream, zeros = torch.zeros(2, 1, 4096, dtype=torch.bfloat16, device="cuda")

    def seconds(add: Sum | None) -> float:
        turn = iter(range(1 << 30))

        def run() -> Tensor:
            weight = weights[next(turn) % 16]
            if add is None:
                return few_row.linear_add(x, weight, stream)
            return add(few_row.linear_add(x, weight, zeros), stream)

        return seconds_of_many(run)

    found = {"alone": seconds(None)} | {way: seconds(add) for way, add in all_ways.items()}
    return {way: round(one * 1e6, 2) for way, one in found.items()}


def are_same(ranks: OneShotCommunicator, dtype: torch.dtype, add: Sum) -> bool:
    """In graphs that multiply and sum by turns, as layers do; each replay with other numbers."""
    makes = torch.Generator("cuda").manual_seed(5 + ranks.rank)
    both = torch.Generator("cuda").manual_seed(4)
    weight = torch.randn(4096, 4096, generator=makes, device="cuda").to(dtype) / 64
    x = torch.zeros(4, 4096, dtype=dtype, device="cuda")

    def layers(one: Sum) -> Tensor:
        stream = x.clone()
        for _ in range(32):
            stream = one(stream @ weight / 8, stream)
        return stream

    def by_nccl(x: Tensor, stream: Tensor) -> Tensor:
        return stream + TorchCommunicator.all_reduce(ranks, x)

    platform = platform_of(torch.device("cuda"))
    graphs = [capture(lambda one=one: layers(one), None, platform) for one in (by_nccl, add)]
    same = True
    for _ in range(_REPLAYS):
        x.copy_(torch.randn(4, 4096, generator=both, device="cuda").to(dtype))
        for graph, _out in graphs:
            graph.replay()
        same &= torch.equal(graphs[0][1], graphs[1][1])
    return same


def run(rank: int, folder: str, only_forms: bool) -> None:
    torch.cuda.set_device(rank)
    store = FileStore(f"{folder}/store", 2)
    with torch.inference_mode():
        ranks = OneShotCommunicator(store, rank, 2, torch.device("cuda"))
        name = None if ranks.kernel is None else ranks.kernel.name
        found = {"takes": name, "same": {}} if only_forms else measure(ranks)
        if name == OwnKernel.name:
            found["forms"] = measure_forms(ranks)
            found["same"] |= found["forms"].pop("same")
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # a group of NCCL is never destroyed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-forms", action="store_true")
    parser.add_argument("--rank", type=int, help="used by the script itself")
    parser.add_argument("--folder")
    args = parser.parse_args()
    if args.rank is not None:
        run(args.rank, args.folder, args.only_forms)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder]
        command += ["--only-forms"] * args.only_forms + ["--rank"]
        processes = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        codes = [one.wait() for one in processes]
        print("codes", codes, flush=True)
        found = [json.loads(one.read_text()) for one in sorted(Path(folder).glob("rank*.json"))]
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))
    print([(one["takes"], one["same"]) for one in found], flush=True)
    return int(codes != [0, 0] or not all(all(one["same"].values()) for one in found))


if __name__ == "__main__":
    sys.exit(main())
