"""The exact distribution of one round: every draft, every way that the coins can fall."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from specengine.core.interfaces import LogitsOutput
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal
from specengine.engine.proof.shapes import Shape
from specengine.engine.proof.tables import FIRST, ROOT, TablePair, decode_batch, propose, request
from specengine.kernels.accept.accept_sampled_ref import next_weights
from specengine.layers.logits import RowMap
from specengine.layers.sampler import ONE_TO_ONE
from specengine.target.verify.base import TreeVerifier
from specengine.target.verify.probs import RoundProbs
from specengine.target.verify.sampled import SampledVerifier
from specengine.target.verify.walk import path_to


class NotEnumerable(Exception):
    """Why the outcomes of a rule cannot be enumerated."""


class ScriptedCoins:
    """Each node's coin falls on the event that a script names, and notes the chance of it. Of the
    scripts that differ in a coin which is never tossed, the one where it falls on none counts."""

    def __init__(self, events_BN: Tensor, num_events: int) -> None:
        self.events_BN = events_BN
        self.chances_BN = (events_BN == num_events).double()

    def pick(self, chances_BMK: Tensor, nodes_BM: Tensor) -> Tensor:
        none_BM1 = 1.0 - chances_BMK.sum(-1, keepdim=True)
        events_BM = self.events_BN.gather(1, nodes_BM)
        noted_BM1 = torch.cat([chances_BMK, none_BM1], -1).gather(2, events_BM[:, :, None])
        noted_BM = noted_BM1.squeeze(2)
        self.chances_BN.scatter_(1, nodes_BM, noted_BM)
        return events_BM.where(noted_BM > 0, chances_BMK.shape[-1])


@dataclass(frozen=True)
class Drafts:
    """Drafts of one shape, with their chances."""

    tokens_XN: Tensor
    probs_XNV: Tensor
    chances_X: Tensor  # float64

    @classmethod
    def sampled(cls, pair: TablePair, shape: Shape) -> Drafts:
        """All that can be drawn. Nodes below a token that ends the draft are drawn like the
        others: they are not read."""
        tokens_XN = torch.tensor([[FIRST]])
        probs_XNV = torch.zeros(1, 1, pair.vocab, dtype=torch.float64)
        chances_X = torch.ones(1, dtype=torch.float64)
        for node, parent in enumerate(shape.parents, start=1):
            before = shape.grandparent(node)
            before_X = ROOT[0] if before is None else tokens_XN[:, before]
            probs_XV = pair.draft[before_X, tokens_XN[:, parent]]
            left_XV = probs_XV.scatter(1, tokens_XN[:, shape.earlier_siblings(node)], 0.0)
            left_XV = left_XV / left_XV.sum(-1, keepdim=True)
            source, token = left_XV.nonzero().unbind(1)
            tokens_XN = torch.cat([tokens_XN[source], token[:, None]], dim=1)
            probs_XNV = torch.cat([probs_XNV[source], probs_XV[source, None]], dim=1)
            chances_X = chances_X[source] * left_XV[source, token]
        return cls(tokens_XN, probs_XNV, chances_X)

    @classmethod
    def certain(cls, pair: TablePair, shape: Shape) -> Drafts:
        """One draft that is always the same; its probabilities are one-hot."""
        tokens = [FIRST]
        for node in range(1, shape.num_nodes):
            rank = len(shape.earlier_siblings(node))
            tokens.append((shape.depths[node] + rank) % pair.vocab)
        tokens_1N = torch.tensor([tokens])
        probs_1NV = torch.nn.functional.one_hot(tokens_1N, pair.vocab).double()
        return cls(tokens_1N, probs_1NV, torch.ones(1, dtype=torch.float64))

    def repeat(self, times: int) -> Drafts:
        parts = (self.tokens_XN, self.probs_XNV, self.chances_X)
        return Drafts(*(part.repeat_interleave(times, 0) for part in parts))


@dataclass(frozen=True)
class Outcomes:
    """Every way that a round can go."""

    accepted: list[list[int]]  # the tokens of the accepted drafts
    next_BV: Tensor  # float64, the chance of this way, by the token that follows


def judged(verifier: SampledVerifier, pair: TablePair, shape: Shape, drafts: Drafts) -> Outcomes:
    """Outcomes of a rule that tosses coins: all drafts times all scripts."""
    num_events = _num_events(verifier, pair, shape, drafts)
    scripts_SN = _scripts(shape, num_events)
    coins = ScriptedCoins(scripts_SN.repeat(len(drafts.tokens_XN), 1), num_events)
    drafts = drafts.repeat(len(scripts_SN))
    proposal, probs = round_probs(pair, shape, drafts)
    verdict = verifier.judge(probs, coins)
    next_BV = next_weights(probs, verdict).double()
    next_BV = next_BV / next_BV.sum(-1, keepdim=True)
    chances_B = drafts.chances_X * coins.chances_BN.prod(-1)
    columns = (proposal.tokens, proposal.parents, verdict.ends_B)
    accepted = [
        [tokens[node] for node in path_to(end, parents)[1:]]
        for tokens, parents, end in zip(*(x.tolist() for x in columns), strict=True)
    ]
    return Outcomes(accepted, next_BV * chances_B[:, None])


def matched(verifier: TreeVerifier, pair: TablePair, shape: Shape, drafts: Drafts) -> Outcomes:
    """Outcomes of a rule that decides by the tokens that its sampler chooses at nodes: all drafts
    times all such tokens. The rule's own accept runs. Raises NotEnumerable where it decides by
    anything else."""
    chosen_SN = torch.tensor(list(product(range(pair.vocab), repeat=shape.num_nodes)))
    chosen_BN = chosen_SN.repeat(len(drafts.tokens_XN), 1)
    drafts = drafts.repeat(len(chosen_SN))
    proposal, probs = round_probs(pair, shape, drafts)
    chosen_T = chosen_BN[probs.exists_BN]
    tokens = _emitted(verifier, pair, proposal, chosen_T, [0] * len(chosen_BN))
    if tokens != _emitted(verifier, pair, proposal, chosen_T, list(range(1, len(chosen_BN) + 1))):
        raise NotEnumerable("it draws numbers beside those of its sampler")
    chances_BN = torch.full(chosen_BN.shape, 1.0 / pair.vocab, dtype=torch.float64)
    target_TV = probs.target_TV / probs.target_sum_T[:, None]
    chances_BN[probs.exists_BN] = target_TV.gather(1, chosen_T[:, None]).squeeze(1)
    chances_B = chances_BN.prod(-1) * drafts.chances_X
    next_BV = torch.zeros(len(tokens), pair.vocab, dtype=torch.float64)
    last_B = torch.tensor([emitted[-1] for emitted in tokens])
    next_BV.scatter_(1, last_B[:, None], chances_B[:, None])
    return Outcomes([emitted[:-1] for emitted in tokens], next_BV)


class _ScriptedSampler:
    """Chooses these tokens, one a node that exists."""

    def __init__(self, tokens_T: Tensor) -> None:
        self.tokens_T = tokens_T
        self.was_asked = False

    def __call__(
        self, output: LogitsOutput, sampling: SamplingBatch, rows: RowMap = ONE_TO_ONE
    ) -> Tensor:
        if len(output.logits) != len(self.tokens_T):
            raise NotEnumerable("it does not ask its sampler about all nodes at once")
        self.was_asked = True
        return self.tokens_T


def _emitted(
    verifier: TreeVerifier,
    pair: TablePair,
    proposal: DraftProposal,
    chosen_T: Tensor,
    seeds: list[int],
) -> list[list[int]]:
    """What the rule emits of requests with these seeds, where its sampler chooses these tokens."""
    reqs = [request(seed) for seed in seeds]
    scripted, sampler = copy(verifier), _ScriptedSampler(chosen_T)
    scripted.sampler = sampler
    output = pair.logits(reqs, proposal)
    found = scripted.accept(output, decode_batch(reqs, pair.vocab), proposal)
    if not sampler.was_asked:
        raise NotEnumerable("it does not ask its sampler")
    return found.tokens


def joint_error(outcomes: Outcomes, pair: TablePair, shape: Shape) -> float:
    """The largest difference between the joint distribution of the tokens that a round emits,
    continued by the target to one length, and the target's own."""
    length = max(shape.depths) + 1
    tails = [pair.joint(left) for left in range(length + 1)]
    found = torch.zeros(pair.vocab**length, dtype=torch.float64)
    for path, next_V in zip(outcomes.accepted, outcomes.next_BV.tolist(), strict=True):
        for token, chance in enumerate(next_V):
            if chance > 0:
                text = (*ROOT, *path, token)
                tail = tails[length - len(path) - 1][text[-2], text[-1]]
                start = _index(text[2:], pair.vocab) * len(tail)
                found[start : start + len(tail)] += chance * tail
    return float((found - tails[length][ROOT]).abs().max())


def round_probs(pair: TablePair, shape: Shape, drafts: Drafts) -> tuple[DraftProposal, RoundProbs]:
    """A request for each draft, and what a verifier sees of it."""
    proposal = propose(shape, drafts.tokens_XN, drafts.probs_XNV)
    reqs = [request()] * len(drafts.tokens_XN)
    sampling = decode_batch(reqs, pair.vocab).sampling
    return proposal, RoundProbs.of(pair.logits(reqs, proposal).logits, sampling, proposal)


class _Counter:
    """Accepts nothing; notes how many events a coin decides between."""

    num_events = 1

    def pick(self, chances_BMK: Tensor, nodes_BM: Tensor) -> Tensor:
        self.num_events = chances_BMK.shape[-1]
        return torch.full_like(nodes_BM, self.num_events)


def _num_events(verifier: SampledVerifier, pair: TablePair, shape: Shape, drafts: Drafts) -> int:
    counter = _Counter()
    verifier.judge(round_probs(pair, shape, drafts)[1], counter)
    return counter.num_events


def _scripts(shape: Shape, num_events: int) -> Tensor:
    """int64 [S, N]: either a node's own coin decides whether it is accepted, or its parent's coin
    which child is."""
    nodes = range(shape.num_nodes)
    if num_events == 1:
        events = [[0, 1] if node else [1] for node in nodes]
    else:
        events = [
            [child for child in nodes if child and shape.parents[child - 1] == node] + [num_events]
            for node in nodes
        ]
    return torch.tensor(list(product(*events)))


def _index(tokens: tuple[int, ...], vocab: int) -> int:
    index = 0
    for token in tokens:
        index = index * vocab + token
    return index
