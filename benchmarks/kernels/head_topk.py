"""One level of a draft tree's growth on a GPU, from states to beams: microseconds a level inside a
CUDA graph of dependent levels.

    python benchmarks/kernels/head_topk.py

"one kernel" is `head_topk`, whose partials `tree_step` reads; "apart" the norm of a draft's head,
cuBLAS's product, logits as float32 and `tree_step` on those. Levels take turns among copies of the
weights, so that they come from memory; "again" takes the same copy each time, as steps of a draft
do.
"""

from __future__ import annotations

import argparse
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
from head_best import HEADS, Head

from specengine.kernels.head.head_topk import head_topk
from specengine.kernels.head.types import BlockPartials
from specengine.kernels.linear.norm import rms_norm
from specengine.kernels.tree.tree_step import tree_step
from specengine.kernels.tree.types import Beams, Found

EPS = 1e-5
_FAR = 256 << 20  # bytes of weights between two calls with one copy
_STEPS = 3


@dataclass(frozen=True)
class Size:
    batch_size: int
    topk: int
    is_root: bool = False

    @property
    def rows(self) -> int:
        return self.batch_size * (1 if self.is_root else self.topk)


SIZES = [Size(1, 4, True), Size(1, 4), Size(2, 4), Size(4, 4), Size(1, 8, True), Size(1, 8)]
FEW = [Size(1, 4)]
CASES = {"135M draft": SIZES, "135M": FEW, "360M": FEW, "8B draft": FEW, "8B": FEW}


@dataclass
class Case:
    head: Head
    size: Size
    x: Tensor
    gain: Tensor
    weights: list[Tensor]
    found: Found
    beams: Beams | None
    counters: Tensor

    def together(self, i: int) -> Beams:
        return self._grow(self._shares(i))

    def head_alone(self, i: int) -> BlockPartials:
        return self._shares(i)

    def apart(self, i: int) -> Beams:
        x = rms_norm(self.x, self.gain, EPS) if self.head.has_norm else self.x
        return self._grow(F.linear(x, self.weights[i % len(self.weights)]).float())

    def _shares(self, i: int) -> BlockPartials:
        around = (self.gain, EPS) if self.head.has_norm else (None, 0.0)
        weight = self.weights[i % len(self.weights)]
        return head_topk(self.x, weight, self.size.topk, *around, backend="cuda")

    def _grow(self, told: Tensor | BlockPartials) -> Beams:
        return tree_step(told, self.beams, self.found, self.size.topk, self.counters)


def make(head: Head, size: Size) -> Case:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    copies = 2 + _FAR // (head.vocab * head.hidden * 2)
    weights = [draw(head.vocab, head.hidden) * head.hidden**-0.5 for _ in range(copies)]
    device = weights[0].device
    found = Found.of(size.batch_size, size.topk, _STEPS, device)
    counters = torch.zeros(size.batch_size, dtype=torch.int32, device=device)
    beams: Beams | None = None
    if not size.is_root:
        logits = torch.randn(size.batch_size, 1000, device=device)
        beams = tree_step(logits, None, found, size.topk, counters)
    x, gain = draw(size.rows, head.hidden), draw(head.hidden)
    return Case(head, size, x, gain, weights, found, beams, counters)


def measure(head: Head, size: Size) -> dict[str, Any]:
    case = make(head, size)
    same = case.together(0).tokens_BK == case.apart(0).tokens_BK
    row: dict[str, Any] = {"head": head.name, "requests": size.batch_size, "topk": size.topk}
    row |= {"rows": size.rows, "agree": same.float().mean().item()}
    count = 2 * len(case.weights)
    row["one kernel us"] = chain_us(case.together, count)
    row["apart us"] = chain_us(case.apart, count)
    case.weights = case.weights[:1]
    row["one kernel again us"] = chain_us(case.together, count)
    row["apart again us"] = chain_us(case.apart, count)
    row["head alone again us"] = chain_us(case.head_alone, count)
    return row


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    heads, rows = {head.name: head for head in HEADS}, []
    for name, sizes in CASES.items():
        for size in sizes:
            rows.append(measure(heads[name], size))
            print(rows[-1], flush=True)
    print(
        report.write("kernels", "head-topk", "A level of a tree from the head's own partials", rows)
    )


if __name__ == "__main__":
    main()
