"""Rules for sampled drafts on a GPU: microseconds a round, in Triton and in PyTorch.

    python benchmarks/kernels/accept_sampled.py

Chains of three drafts, and trees of a root with three children that have one each. Rows are random
weights that agree so far that some drafts stand. What the host takes to launch counts as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.core.random_streams import Stream
from specengine.kernels.accept_block import accept_block
from specengine.kernels.accept_rejection import accept_rejection
from specengine.kernels.accept_sampled import Draws, SampledRound, row_sums
from specengine.kernels.accept_sibling import accept_sibling

CHAIN, TREE = [0, 0, 1, 2], [0, 0, 0, 0, 1, 2, 3]
RULES: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "rejection": (accept_rejection, CHAIN),
    "block": (accept_block, CHAIN),
    "sibling, chain": (accept_sibling, CHAIN),
    "sibling, tree": (accept_sibling, TREE),
}


def draw(parents: list[int], batch: int, vocab: int) -> SampledRound:
    nodes, depths = len(parents), [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)

    def rows(*size: int) -> Tensor:
        return torch.rand(*size, vocab, device="cuda") ** 8

    def each(values: list[int]) -> Tensor:
        return torch.tensor(values, device="cuda").expand(batch, nodes).contiguous()

    target = rows(batch * nodes)
    above = target.view(batch, nodes, vocab)[:, parents]
    draft = above * (0.5 + torch.rand(batch, nodes, 1, device="cuda")) + 0.3 * rows(batch, nodes)
    return SampledRound(
        target_TV=target,
        target_sum_T=row_sums(target),
        draft_BNV=draft,
        tokens_BN=torch.multinomial(draft.flatten(0, 1), 1).view(batch, nodes),
        parents_BN=each(parents),
        exists_BN=torch.ones(batch, nodes, dtype=torch.bool, device="cuda"),
        depths_BN=each(depths),
        roots_B=torch.arange(batch, device="cuda") * nodes,
        greedy_B=torch.zeros(batch, dtype=torch.bool, device="cuda"),
    )


def us(run: Callable[[], Any], count: int = 20) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        times.append((perf_counter() - start) / count)
    return min(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 128_256])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name, (rule, parents) in RULES.items():
        for vocab in args.vocab:
            for batch in args.requests:
                drafts, seeds = draw(parents, batch, vocab), torch.arange(batch, device="cuda")
                streams = (int(each) for each in (Stream.ACCEPT, Stream.RESIDUAL, Stream.SAMPLE))
                draws = Draws(seeds, seeds + 3, *streams)
                row: dict[str, Any] = {"rule": name, "vocabulary": vocab, "requests": batch}
                for backend in ("torch", "triton"):
                    row[f"{backend} us"] = us(partial(rule, drafts, draws, backend=backend))
                found.append(row)
                print(row, flush=True)
    print(report.write("accept-sampled", "Rules for sampled drafts", found))


if __name__ == "__main__":
    main()
