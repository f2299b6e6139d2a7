"""All-reduces of two GPUs of one host, NCCL's beside --enable-symm-mem's, by the rows of a round.

    NCCL_NVLS_ENABLE=0 python benchmarks/parallel/all_reduces.py --out $OUT/all_reduces.json

Needs no model. Both are captured, 64 in a graph. Whether each gives NCCL's bits is looked at in
every replay, beside products of the same stream.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch._C._distributed_c10d import FileStore  # noqa: E402

from benchmarks.parallel.on_ranks import seconds_in_graph  # noqa: E402
from specengine.runner.capture import capture  # noqa: E402
from specengine.runner.communicators.one_shot import OneShotCommunicator  # noqa: E402
from specengine.runner.communicators.torch_distributed import TorchCommunicator  # noqa: E402

WIDTHS = {"135M": 576, "8B": 4096, "70B": 8192}
ROWS = (1, 4, 8, 16, 32, 64, 128, 256)
_REPLAYS = 50


class NCCL:
    """The same communicator without its kernel."""

    def __init__(self, ranks: TorchCommunicator) -> None:
        self.ranks = ranks

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return TorchCommunicator.all_reduce(self.ranks, x)


def measure(ranks: OneShotCommunicator) -> dict[str, Any]:
    found: dict[str, Any] = {"takes": ranks.is_one_kernel}
    for name, width in WIDTHS.items():
        for count in ROWS:
            x = torch.zeros(count, width, dtype=torch.bfloat16, device="cuda")
            pair = [seconds_in_graph(one, x) * 1e6 for one in (NCCL(ranks), ranks)]
            found[f"{name} {count}"] = [round(one, 1) for one in pair]
            if ranks.rank == 0:
                print(
                    f"{name:>5} {count:>4} rows: NCCL {pair[0]:.1f} us, {pair[1]:.1f}", flush=True
                )
    found["same"] = {
        str(dtype): are_same(ranks, dtype) for dtype in (torch.bfloat16, torch.float32)
    }
    return found


def are_same(ranks: OneShotCommunicator, dtype: torch.dtype) -> bool:
    """In graphs that multiply and sum by turns, as layers do; each replay with other numbers."""
    makes = torch.Generator("cuda").manual_seed(5 + ranks.rank)
    weight = torch.randn(4096, 4096, generator=makes, device="cuda").to(dtype) / 64
    x = torch.zeros(4, 4096, dtype=dtype, device="cuda")

    def layers(one: Any) -> torch.Tensor:
        stream = x.clone()
        for _ in range(32):
            stream = stream + one.all_reduce(stream @ weight) / 8
        return stream

    graphs = [capture(lambda one=one: layers(one), None) for one in (NCCL(ranks), ranks)]
    for _ in range(_REPLAYS):
        x.copy_(torch.randn(4, 4096, generator=makes, device="cuda").to(dtype))
        for graph, _out in graphs:
            graph.replay()
        if not torch.equal(graphs[0][1], graphs[1][1]):
            return False
    return True


def run(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    store = FileStore(f"{folder}/store", 2)
    with torch.inference_mode():
        found = measure(OneShotCommunicator(store, rank, 2, torch.device("cuda")))
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # a group of NCCL is never destroyed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help="used by the script itself")
    parser.add_argument("--folder")
    args = parser.parse_args()
    if args.rank is not None:
        run(args.rank, args.folder)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--folder", folder, "--rank"]
        processes = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        codes = [one.wait() for one in processes]
        print("codes", codes, flush=True)
        found = [json.loads(one.read_text()) for one in sorted(Path(folder).glob("rank*.json"))]
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))
    print([(one["takes"], one["same"]) for one in found], flush=True)


if __name__ == "__main__":
    main()
