"""Rounds of sampled drafts: random ones, and ones that follow tables of a target and a drafter."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specengine.kernels.accept.types import Accepted, Draws, SampledRound, row_sums
from specengine.kernels.sample.keyed_uniform import LANE
from specengine.kernels.sample.keyed_uniform_ref import keyed_uniform
from specengine.kernels.sample.sample_rows_ref import invert_cdf

SAMPLE, DRAFT, ACCEPT, RESIDUAL = range(4)
CPU = torch.device("cpu")


def draws_of(batch: int, device: torch.device, first_seed: int = 0) -> Draws:
    seeds = torch.arange(batch, device=device) + first_seed
    return Draws(seeds, seeds % 7 + 3, accept=ACCEPT, residual=RESIDUAL, sample=SAMPLE)


def moved(drafts: SampledRound, device: torch.device) -> SampledRound:
    given = {name: x if x is None else x.to(device) for name, x in vars(drafts).items()}
    return SampledRound(**given)


def round_of(
    parents: list[list[int]], tokens: list[list[int]], target: Tensor, draft: Tensor, greedy: Tensor
) -> SampledRound:
    """parents and tokens of the nodes that exist, the root's parent 0; target [T, V]; draft
    [B, N, V], of which rows that must not be read are made absurd."""
    counts, width = [len(row) for row in parents], draft.shape[1]
    padded = [[*row, *[0] * (width - len(row))] for row in parents]
    depths = []
    for row in parents:
        levels = [0]
        for parent in row[1:]:
            levels.append(levels[parent] + 1)
        depths.append([*levels, *[-1] * (width - len(row))])
    exists = torch.arange(width) < torch.tensor(counts)[:, None]
    draft = draft.clone()
    draft[:, 0] = draft[~exists] = draft[greedy] = float("nan")
    return SampledRound(
        target_TV=target,
        target_sum_T=row_sums(target),
        draft_BNV=draft,
        tokens_BN=torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens]),
        parents_BN=torch.tensor(padded),
        exists_BN=exists,
        depths_BN=torch.tensor(depths),
        roots_B=torch.tensor([0, *counts[:-1]]).cumsum(0),
        greedy_B=greedy,
    )


def random_round(
    rng: random.Random, batch: int, width: int, vocab: int, tree: bool
) -> SampledRound:
    """Requests of up to `width` nodes, one greedy; siblings differ. Most tokens are likely ones of
    both, some such as neither can say."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    all_parents, all_tokens = [], []
    for _ in range(batch):
        parents, tokens = [0], [rng.randrange(vocab)]
        while len(parents) < rng.choice([1, width, width]):
            parent = (
                rng.randrange(max(0, len(parents) - 3), len(parents)) if tree else len(tokens) - 1
            )
            taken = {t for t, p in zip(tokens[1:], parents[1:], strict=True) if p == parent}
            parents.append(parent)
            tokens.append(rng.choice([token for token in range(vocab) if token not in taken]))
        all_parents.append(parents)
        all_tokens.append(tokens)
    greedy = torch.arange(batch) == 1
    target = _rows(sum(map(len, all_parents)), vocab, generator)
    draft = _rows(batch * width, vocab, generator).view(batch, width, vocab)
    start = 0
    for b, parents in enumerate(all_parents):
        rows = target[start : start + len(parents)]
        if greedy[b]:
            rows.copy_(torch.nn.functional.one_hot(rows.argmax(-1), vocab))
        for node in range(1, len(parents)):
            if rng.random() < 0.7:  # a token that stands with some chance
                token, parent = all_tokens[b][node], parents[node]
                draft[b, node, token] = max(0.1, float(draft[b, node, token]))
                rows[parent, token] = rng.choice([0.05, 0.5, 1.0])
            # A token of no weight would be rejected here, and what is left be rounding alone.
            if rng.random() < 0.1 and rows[parents[node], all_tokens[b][node]] > 0:
                draft[b, node] = rows[parents[node]]
        start += len(parents)
    return round_of(all_parents, all_tokens, target, draft, greedy)


def peaked(drafts: SampledRound) -> SampledRound:
    """With a target that often says what was drafted, however large the vocabulary."""
    target_TV, below = drafts.target_TV, drafts.depths_BN > 0
    rows = (drafts.roots_B[:, None] + drafts.parents_BN)[below], drafts.tokens_BN[below]
    scaled_TV = target_TV * (2.0 / drafts.target_sum_T[:, None]).clamp(max=1.0).float()
    scaled_TV[rows] = target_TV[rows]
    return replace(drafts, target_TV=scaled_TV, target_sum_T=row_sums(scaled_TV))


def _rows(count: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Weights of which a third is 0."""
    rows = torch.rand(count, vocab, generator=generator) ** 3
    rows[torch.rand(rows.shape, generator=generator) < 0.3] = 0.0
    rows[:, 0] += 0.01
    return rows


@dataclass(frozen=True)
class Tables:
    """Distributions of the next token after a token, [V, V]; every request begins with token 0."""

    target: Tensor
    draft: Tensor

    @classmethod
    def apart(cls) -> Tables:
        """Tables of three tokens; they agree so little that few rounds tell a wrong rule."""
        return cls(
            torch.tensor([[0.3, 0.6, 0.1], [0.0, 0.4, 0.6], [0.6, 0.1, 0.3]]),
            torch.tensor([[0.7, 0.1, 0.2], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7]]),
        )

    def drafted(self, parents: list[int], draws: Draws) -> SampledRound:
        """One round: every request drafts the same shape, siblings without replacement."""
        batch, vocab, width = len(draws.seeds_B), len(self.target), len(parents)
        tokens_BN = torch.zeros(batch, width, dtype=torch.int64)
        draft_BNV = torch.zeros(batch, width, vocab)
        depths = [0]
        for node in range(1, width):
            depths.append(depths[parents[node]] + 1)
            draft_BNV[:, node] = self.draft[tokens_BN[:, parents[node]]]
            earlier = [n for n in range(1, node) if parents[n] == parents[node]]
            left_BV = draft_BNV[:, node].scatter(1, tokens_BN[:, earlier], 0.0)
            left_BV = left_BV / left_BV.sum(-1, keepdim=True)
            position_B = draws.positions_B + depths[node] - 1 + node * LANE
            uniforms_B = keyed_uniform(draws.seeds_B, position_B, DRAFT)
            tokens_BN[:, node] = invert_cdf(left_BV, uniforms_B)
        target_TV = self.target[tokens_BN].flatten(0, 1)
        greedy = torch.zeros(batch, dtype=torch.bool)
        return round_of([parents] * batch, tokens_BN.tolist(), target_TV, draft_BNV, greedy)

    def emitted(self, drafts: SampledRound, found: Accepted, length: int) -> Tensor:
        """int64 [B, length], the tokens of the round, continued by the target."""
        generator = torch.Generator().manual_seed(1)
        outputs = []
        columns = (drafts.tokens_BN, drafts.parents_BN, found.ends_B, found.tokens_B)
        for tokens, parents, end, last in zip(*(x.tolist() for x in columns), strict=True):
            path = [last]
            while end:
                path.insert(0, tokens[end])
                end = parents[end]
            while len(path) < length:
                path.append(int(self.target[path[-1]].multinomial(1, generator=generator)))
            outputs.append(path[:length])
        return torch.tensor(outputs)

    def joint(self, length: int) -> Tensor:
        """[V ** length], of the first tokens."""
        joint = self.target[0]
        for _ in range(length - 1):
            joint = joint[..., None] * self.target
        return joint.flatten().double()
