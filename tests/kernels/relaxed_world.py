"""Rounds of drafts to relax, and what the definition makes of them, in plain Python."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.kernels.accept.types import RelaxedRound


def round_of(
    drafts: list[tuple[list[int], list[int]]], logits: Tensor, chosen: list[int]
) -> RelaxedRound:
    """drafts: tokens and parents of each request's nodes. Nothing may read the absurd padding."""
    counts = [len(tokens) for tokens, _ in drafts]
    width = max(counts)
    return RelaxedRound(
        logits_TV=logits,
        chosen_T=torch.tensor(chosen),
        tokens_BN=torch.tensor([[*row, *[-7] * (width - len(row))] for row, _ in drafts]),
        parents_BN=torch.tensor([[*row, *[99] * (width - len(row))] for _, row in drafts]),
        counts_B=torch.tensor(counts),
        roots_B=torch.tensor([0, *counts[:-1]]).cumsum(0),
    )


def moved(drafts: RelaxedRound, device: torch.device) -> RelaxedRound:
    return RelaxedRound(**{name: x.to(device) for name, x in vars(drafts).items()})


def random_round(
    rng: random.Random, batch: int, width: int, vocab: int, tree: bool
) -> RelaxedRound:
    """Requests of up to `width` nodes; siblings may be equal. Logits have ties, some rows a token
    that is forbidden, one row nothing else; a draft in three is what the target says."""
    drafts, chosen = [], []
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    for _ in range(batch):
        count, parents = rng.choice([1, rng.randint(1, width), width]), [-1]
        while len(parents) < count:
            parents.append(
                rng.randrange(max(0, len(parents) - 4), len(parents)) if tree else len(parents) - 1
            )
        tokens, said = ([rng.randrange(vocab) for _ in parents] for _ in range(2))
        for node in range(1, count):
            if rng.random() < 0.3:
                said[parents[node]] = tokens[node]
        drafts.append((tokens, parents))
        chosen += said
    logits = (4 * torch.randn(len(chosen), vocab, generator=generator)).round() / 4
    for row, (tokens, node) in enumerate((t, n) for t, p in drafts for n, _ in enumerate(p)):
        if rng.random() < 0.7:  # what is drafted is likely
            logits[row, tokens[min(node + 1, len(tokens) - 1)]] = logits[row].max()
        if rng.random() < 0.3:
            logits[row, torch.rand(vocab, generator=generator) < 0.5] = float("-inf")
        if rng.random() < 0.05:
            logits[row] = float("-inf")
    return round_of(drafts, logits, chosen)


@dataclass(frozen=True)
class Spread:
    drafts: RelaxedRound
    places: list[list[int]]  # of each request's nodes


def with_gaps(drafts: RelaxedRound, rng: random.Random) -> Spread:
    """The same nodes among others that are no node's children, all requests as large as any."""
    most = drafts.tokens_BN.shape[1]
    width, vocab = most + 3, drafts.logits_TV.shape[1]
    rows, chosen, trees, places = list[Tensor](), list[int](), [], []
    for b, (count, root) in enumerate(
        zip(drafts.counts_B.tolist(), drafts.roots_B.tolist(), strict=True)
    ):
        at = [0, *sorted(rng.sample(range(1, width), count - 1))]
        tokens, parents, said = [-1] * width, [-1] * width, [rng.randrange(vocab)] * width
        logits_NV = torch.zeros(width, vocab)
        for node, place in enumerate(at):
            tokens[place] = int(drafts.tokens_BN[b, node])
            parents[place] = at[int(drafts.parents_BN[b, node])] if node else -1
            said[place] = int(drafts.chosen_T[root + node])
            logits_NV[place] = drafts.logits_TV[root + node]
        places.append(at)
        trees.append((tokens, parents))
        rows.append(logits_NV)
        chosen += said
    return Spread(round_of(trees, torch.cat(rows), chosen), places)


def is_fair(row_V: Tensor, token: int, top_k: int, delta: float) -> bool:
    probs = row_V.double().softmax(-1)
    best = probs.topk(min(top_k, len(probs))).values
    floor = torch.maximum(best[-1], best[0] - delta)
    return bool(probs[token] > 0) and bool(probs[token] >= floor)


def walk(
    tokens: list[int], parents: list[int], chosen: list[int], rows: Tensor, top_k: int, delta: float
) -> int:
    """Where the path of one request ends: the definition, in plain Python."""
    end = 0
    while True:
        children = [node for node in range(end + 1, len(tokens)) if parents[node] == end]
        standing = [node for node in children if tokens[node] == chosen[end]]
        standing += [node for node in children if is_fair(rows[end], tokens[node], top_k, delta)]
        if not standing:
            return end
        end = standing[0]


def expected(drafts: RelaxedRound, top_k: int, delta: float) -> tuple[list[int], list[int]]:
    ends, tokens = [], []
    for b, (count, root) in enumerate(
        zip(drafts.counts_B.tolist(), drafts.roots_B.tolist(), strict=True)
    ):
        chosen = drafts.chosen_T[root : root + count].tolist()
        columns = (drafts.tokens_BN[b, :count].tolist(), drafts.parents_BN[b, :count].tolist())
        rows = drafts.logits_TV[root : root + count]
        ends.append(walk(*columns, chosen, rows, top_k, delta))
        tokens.append(chosen[ends[-1]])
    return ends, tokens
