"""Rules for sampled drafts on a GPU: microseconds a round, in Triton and in PyTorch.

    python benchmarks/kernels/accept_sampled.py

Chains of three drafts, trees of a root with three children that have one each, and one of 16 nodes.
Rows are random weights that agree so far that some drafts stand; for the rule that asks the target
alone, it says 0.2 of each drafted token. What the host takes to launch counts as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
import report

from specengine.core.random_streams import Stream
from specengine.kernels.accept.accept_block import accept_block
from specengine.kernels.accept.accept_rejection import accept_rejection
from specengine.kernels.accept.accept_sibling import accept_sibling
from specengine.kernels.accept.accept_target_only import accept_target_only
from specengine.kernels.accept.types import Draws, SampledRound, row_sums

CHAIN, TREE = [0, 0, 1, 2], [0, 0, 0, 0, 1, 2, 3]
BUSH = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 5, 5, 6, 8, 11]


@dataclass(frozen=True)
class Case:
    rule: Callable[..., Any]
    parents: list[int]
    said: float = 0.0  # of each drafted token, by the target, beside what it says anyway


CASES = {
    "rejection": Case(accept_rejection, CHAIN),
    "block": Case(accept_block, CHAIN),
    "sibling, chain": Case(accept_sibling, CHAIN),
    "sibling, tree": Case(accept_sibling, TREE),
    "target only, chain": Case(accept_target_only, CHAIN, 0.2),
    "target only, tree": Case(accept_target_only, TREE, 0.2),
    "target only, 16 nodes": Case(accept_target_only, BUSH, 0.2),
}


def draw(case: Case, batch: int, vocab: int) -> SampledRound:
    parents = case.parents
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
    tokens = torch.multinomial(draft.flatten(0, 1), 1).view(batch, nodes)
    said = case.said * above.sum(-1, keepdim=True)
    places = torch.arange(batch, device="cuda")[:, None] * nodes + each(parents)
    below = places[:, 1:], tokens[:, 1:]
    target.index_put_(below, said[:, 1:, 0], accumulate=True)
    target /= target.amax(-1, keepdim=True)
    return SampledRound(
        target_TV=target,
        target_sum_T=row_sums(target),
        draft_BNV=draft,
        tokens_BN=tokens,
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
    for name, case in CASES.items():
        for vocab in args.vocab:
            for batch in args.requests:
                drafts, seeds = draw(case, batch, vocab), torch.arange(batch, device="cuda")
                streams = (int(each) for each in (Stream.ACCEPT, Stream.RESIDUAL, Stream.SAMPLE))
                draws = Draws(seeds, seeds + 3, *streams)
                row: dict[str, Any] = {"rule": name, "vocabulary": vocab, "requests": batch}
                for backend in ("torch", "triton"):
                    row[f"{backend} us"] = us(partial(case.rule, drafts, draws, backend=backend))
                found.append(row)
                print(row, flush=True)
    print(report.write("kernels", "accept-sampled", "Rules for sampled drafts", found))


if __name__ == "__main__":
    main()
