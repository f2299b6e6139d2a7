"""The head with the choice of the best token, on a GPU: microseconds a call inside a CUDA graph of
dependent calls.

    python benchmarks/kernels/head_best.py

"one kernel" is `head_best`, "apart" the norm, cuBLAS's product and `row_argmax`. Calls take turns
among copies of the weights, so that they come from memory; "again" takes the same copy each time,
as steps of a draft do.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import report
from few_row import chain_us

from specengine.kernels.head import head_best, head_stream
from specengine.kernels.head.row_argmax import row_argmax
from specengine.kernels.head.types import Meeting
from specengine.kernels.linear.norm import rms_norm

EPS = 1e-5
_FAR = 256 << 20  # bytes of weights between two calls with one copy


@dataclass(frozen=True)
class Head:
    name: str
    vocab: int
    hidden: int
    has_norm: bool


HEADS = [
    Head("135M draft", 16384, 576, True),
    Head("135M", 49152, 576, False),
    Head("360M", 49152, 960, False),
    Head("1B", 128256, 2048, False),
    Head("8B draft", 32000, 4096, True),
    Head("8B", 128256, 4096, False),
]


@dataclass
class Case:
    head: Head
    x: Tensor
    gain: Tensor
    weights: list[Tensor]
    slots: Tensor
    meeting: Meeting

    @property
    def around(self) -> tuple[Tensor | None, float]:
        return (self.gain, EPS) if self.head.has_norm else (None, 0.0)

    def together(self, i: int) -> Tensor:
        weight = self.weights[i % len(self.weights)]
        return head_best.head_best(self.x, weight, self.slots, *self.around, backend="cuda")

    def apart(self, i: int) -> Tensor:
        x = rms_norm(self.x, self.gain, EPS) if self.head.has_norm else self.x
        return row_argmax(F.linear(x, self.weights[i % len(self.weights)]), self.meeting)


def make(head: Head, rows: int, copies: int) -> Case:
    def draw(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    weights = [draw(head.vocab, head.hidden) * head.hidden**-0.5 for _ in range(copies)]
    device = weights[0].device
    slots, meeting = head_best.slots_for(device), Meeting.of(rows, device)
    return Case(head, draw(rows, head.hidden), draw(head.hidden), weights, slots, meeting)


def measure(head: Head, rows: int) -> dict[str, Any]:
    num_bytes = head.vocab * head.hidden * 2
    case = make(head, rows, 2 + _FAR // num_bytes)
    agree = (case.together(0) == case.apart(0)).float().mean().item()
    row: dict[str, Any] = {"head": head.name, "rows": rows, "agree": agree}
    count = 2 * len(case.weights)
    row["one kernel us"] = chain_us(case.together, count)
    row["apart us"] = chain_us(case.apart, count)
    row["one kernel TB/s"] = num_bytes / row["one kernel us"] / 1e6
    case.weights = case.weights[:1]
    row["one kernel again us"] = chain_us(case.together, count)
    row["apart again us"] = chain_us(case.apart, count)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", nargs="+", default=[head.name for head in HEADS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    args = parser.parse_args()
    rows = []
    for head, count in itertools.product(HEADS, args.rows):
        if head.name not in args.heads:
            continue
        weight = torch.empty(16, head.hidden, dtype=torch.bfloat16)
        if not head_stream.can_take(weight.new_empty(count, head.hidden), weight):
            continue
        rows.append(measure(head, count))
        print(rows[-1], flush=True)
    print(report.write("kernels", "head-best", "The head with the choice of the best token", rows))


if __name__ == "__main__":
    main()
