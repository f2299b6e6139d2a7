"""One of two ranks, a process each with a card of its own: FOLDER RANK. Compares many sums of
varying sizes with NCCL's, eagerly and in graphs, while ranks are late by turns, and writes
FOLDER/rankN.json."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from specengine.core.platform import platform_of
from specengine.runner.capture import capture
from specengine.runner.communicators.one_shot import OneShotCommunicator
from specengine.runner.communicators.torch_distributed import TorchCommunicator

CALLS, IN_A_GRAPH, REPLAYS = 1000, 100, 10
WIDTHS, ROWS = (576, 2048, 4096), (1, 2, 4, 7, 16, 32, 64, 256)  # of which some go bare
DEVICE = torch.device("cuda")
Call = tuple[Tensor, Tensor | None]


def drawn(rank: int, count: int) -> list[Call]:
    """The same shapes on both ranks, other numbers."""
    shapes = random.Random(1)
    own, shared = (torch.Generator("cuda").manual_seed(seed) for seed in (3 + rank, 7))

    def numbers(size: tuple[int, int], makes: torch.Generator, dtype: torch.dtype) -> Tensor:
        a, b = torch.randn(2, *size, generator=makes, device="cuda")
        return (a * (4 * b).exp()).to(dtype)

    found: list[Call] = []
    for _ in range(count):
        size = shapes.choice(ROWS), shapes.choice(WIDTHS)
        dtype = torch.bfloat16 if shapes.random() < 0.8 else torch.float32
        x, stream = numbers(size, own, dtype), numbers(size, shared, dtype)
        found.append((x, stream if shapes.random() < 0.7 else None))
    return found


def run(ranks: OneShotCommunicator, calls: list[Call]) -> list[Tensor]:
    return [
        ranks.all_reduce(x) if stream is None else ranks.all_reduce_add(x, stream)
        for x, stream in calls
    ]


def expected(ranks: OneShotCommunicator, calls: list[Call]) -> list[Tensor]:
    found = []
    for x, stream in calls:
        summed = TorchCommunicator.all_reduce(ranks, x.clone())
        found.append(summed if stream is None else stream + summed)
    return found


def be_late(delays: random.Random) -> None:
    """On the host or on the card, at times."""
    if delays.random() < 0.05:
        time.sleep(delays.random() * 0.003)
    if delays.random() < 0.1:
        torch.cuda._sleep(int(delays.random() * 2_000_000))


def eagerly(ranks: OneShotCommunicator, delays: random.Random) -> list[int]:
    """The calls whose sums are not NCCL's."""
    calls = drawn(ranks.rank, CALLS)
    right = expected(ranks, calls)
    torch.cuda.synchronize()
    found = list[Tensor]()
    for call in calls:
        be_late(delays)
        found += run(ranks, [call])
    return differing(found, right)


def in_graphs(ranks: OneShotCommunicator, delays: random.Random) -> list[int]:
    calls = drawn(ranks.rank, IN_A_GRAPH)
    graph, found = capture(lambda: run(ranks, calls), None, platform_of(DEVICE))
    others = list[int]()
    for _ in range(REPLAYS):
        for x, _stream in calls:
            x.neg_().mul_(1.5)
        right = expected(ranks, calls)
        be_late(delays)
        graph.replay()
        others += differing(found, right)
    return others


def differing(found: list[Tensor], right: list[Tensor]) -> list[int]:
    pairs = enumerate(zip(found, right, strict=True))
    return [number for number, (one, other) in pairs if not torch.equal(one, other)]


def main(folder: Path, rank: int) -> None:
    torch.cuda.set_device(rank)
    with torch.inference_mode():
        ranks = OneShotCommunicator(FileStore(str(folder / "store"), 2), rank, 2, DEVICE)
        delays = random.Random(rank)
        found = {
            "kernel": None if ranks.kernel is None else ranks.kernel.name,
            "others": eagerly(ranks, delays),
            "others in graphs": in_graphs(ranks, delays),
        }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a group of NCCL is never destroyed


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
