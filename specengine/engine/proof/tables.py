"""A target and a drafter that are tables, and rounds over them: no model, no KV, no scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, Verifier
from specengine.engine.proof.check import chi_squared_p
from specengine.engine.proof.shapes import Shape, draw_tree
from specengine.layers.logits import RowMap, target_weights

CPU = torch.device("cpu")
PROMPT = [2, 1]
FIRST = 1  # the output token that every request begins with
ROOT = (PROMPT[-1], FIRST)  # the tokens that its first round continues


@dataclass(frozen=True)
class TablePair:
    """Distributions of the next token after each pair of last tokens, [V, V, V]."""

    target: Tensor
    draft: Tensor

    @classmethod
    def random(cls, vocab: int, seed: int) -> TablePair:
        """float64. Most rows lack a token; one row of both is the same."""
        generator = torch.Generator().manual_seed(seed)
        target, draft = (_random_table(vocab, generator) for _ in range(2))
        draft[0, 0] = target[0, 0]
        return cls(target, draft)

    @property
    def vocab(self) -> int:
        return len(self.target)

    def logits(self, reqs: list[Req], proposal: DraftProposal) -> LogitsOutput:
        """A row a node that exists, as a real target gives them."""
        tokens_BN = proposal.tokens
        before_BN = tokens_BN.gather(1, proposal.parents.clamp(min=0))
        before_BN[:, 0] = torch.tensor([req.token_ids[-2] for req in reqs])
        num_nodes_B1 = torch.tensor(proposal.num_nodes)[:, None]
        exists_BN = torch.arange(tokens_BN.shape[1]) < num_nodes_B1
        return LogitsOutput(self.target.log()[before_BN[exists_BN], tokens_BN[exists_BN]])

    @cached_property
    def said(self) -> Tensor:
        """float64 [V, V, V], what plain decoding samples from: `target`, but for how the sampler
        rounds exp."""
        logits_RV = self.target.log().flatten(0, 1)
        random = decode_batch([request()] * len(logits_RV), self.vocab).sampling.random
        assert random is not None
        weights_RV = target_weights(logits_RV, random, RowMap())
        return (weights_RV / weights_RV.sum(-1, keepdim=True)).view_as(self.target)

    def joint(self, length: int) -> Tensor:
        """float64 [V, V, V ** length]: of the next tokens after each pair of last tokens."""
        joint = self.said.new_ones(self.vocab, self.vocab, 1)
        for _ in range(length):
            joint = (self.said[:, :, :, None] * joint[None]).flatten(2)
        return joint


def _random_table(vocab: int, generator: torch.Generator) -> Tensor:
    table = torch.rand(vocab, vocab, vocab, generator=generator, dtype=torch.float64) ** 2
    lacking = torch.randint(vocab + 1, (vocab, vocab, 1), generator=generator)
    table = torch.where(torch.arange(vocab) == lacking, 0.0, table)
    return table / table.sum(-1, keepdim=True)


@cache
def _params() -> SamplingParams:
    return SamplingParams(max_tokens=None)


def request(seed: int = 0) -> Req:
    return Req("r", PROMPT, _params(), seed=seed, output_ids=[FIRST], req_pool_idx=0)


def decode_batch(reqs: list[Req], vocab: int) -> ScheduleBatch:
    return ScheduleBatch(
        reqs=reqs,
        forward_mode=ForwardMode.DECODE,
        input_ids=[req.last_token for req in reqs],
        prefix_lens=[req.seq_len - 1 for req in reqs],
        extend_lens=[1] * len(reqs),
        samples=[True] * len(reqs),
        sampling=SamplingBatch.from_reqs(reqs, vocab, CPU),
    )


def propose(shape: Shape, tokens_BN: Tensor, probs_BNV: Tensor) -> DraftProposal:
    """The nodes of the shape, cut below the token that it stops at."""
    parents = torch.tensor([[-1, *shape.parents]]).expand_as(tokens_BN)
    num_nodes = [shape.num_nodes] * len(tokens_BN)
    if shape.stops_at is not None:
        stops_BD = tokens_BN[:, 1:] == shape.stops_at
        num_nodes = (2 + (~stops_BD[:, :-1]).long().cumprod(-1).sum(-1)).tolist()
    return DraftProposal(tokens_BN, parents, num_nodes, shape.is_chain, probs_BNV)


def generate(
    pair: TablePair,
    shape: Shape,
    verifier: Verifier,
    num_requests: int,
    length: int,
    *,
    keyed_by_node: bool = True,
) -> Tensor:
    """int64 [B, length], the first output tokens after FIRST; request i has seed i. Rounds are
    those of an engine, and as many as it takes."""
    reqs = [request(seed) for seed in range(num_requests)]
    batch = decode_batch(reqs, pair.vocab)
    sampling, table = batch.sampling, pair.draft.float()
    while min(len(req.output_ids) for req in reqs) <= length:
        sampling.refresh(reqs)
        assert sampling.random is not None
        assert sampling.output_pos is not None
        drawn = draw_tree(
            shape,
            torch.tensor([req.token_ids[-2:] for req in reqs]),
            lambda pairs_B2: table[pairs_B2[:, 0], pairs_B2[:, 1]],
            sampling.random.seeds,
            sampling.output_pos,
            keyed_by_node=keyed_by_node,
        )
        proposal = propose(shape, drawn.tokens_BN, drawn.probs_BNV)
        result = verifier.accept(pair.logits(reqs, proposal), batch, proposal)
        for req, tokens in zip(reqs, result.tokens, strict=True):
            req.output_ids += tokens
    return torch.tensor([req.output_ids[1 : 1 + length] for req in reqs])


def joint_p(outputs_BL: Tensor, pair: TablePair) -> float:
    """χ² of joint outputs against the target's distribution: the chance of such a difference."""
    num_requests, length = outputs_BL.shape
    place_L = pair.vocab ** torch.arange(length - 1, -1, -1)
    observed = torch.bincount((outputs_BL * place_L).sum(-1), minlength=pair.vocab**length)
    return chi_squared_p(observed, pair.joint(length)[ROOT] * num_requests)
