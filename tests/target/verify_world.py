"""A target that is a table, and rounds of speculation over it without model, KV or scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, Verifier, VerifyResult
from tests.device import DEVICE

Draft = tuple[list[int], list[int]]  # tokens and parents of the nodes below the root


class TableTarget:
    """Logits depend on the last two tokens."""

    def __init__(self, vocab: int, seed: int = 0, sharpness: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        table = sharpness * torch.randn(vocab, vocab, vocab, generator=generator)
        self.table = table.to(DEVICE)

    def __call__(self, batch: ScheduleBatch, proposal: DraftProposal) -> LogitsOutput:
        """A row a node that exists, as a real target gives them."""
        before, last = [], []
        for i, req in enumerate(batch.reqs):
            tokens, parents = proposal.tokens[i].tolist(), proposal.parents[i].tolist()
            for node in range(proposal.num_nodes[i]):
                last.append(tokens[node])
                parent = parents[node]
                before.append(tokens[parent] if node else req.token_ids[-2])
        return LogitsOutput(self.table[before, last])


def request(seed: int = 0, **options: Any) -> Req:
    params = SamplingParams(**{"max_tokens": None, **options})
    return Req("r", [1, 2], params, frozenset({0}), seed, output_ids=[1], req_pool_idx=0)


def decode_batch(reqs: list[Req], vocab: int) -> ScheduleBatch:
    return ScheduleBatch(
        reqs=reqs,
        forward_mode=ForwardMode.DECODE,
        input_ids=[req.last_token for req in reqs],
        prefix_lens=[req.seq_len - 1 for req in reqs],
        extend_lens=[1] * len(reqs),
        samples=[True] * len(reqs),
        sampling=SamplingBatch.from_reqs(reqs, vocab, DEVICE),
    )


def propose(roots: list[int], drafts: list[Draft]) -> DraftProposal:
    """Padding carries absurd values: nothing may read it."""
    width = 1 + max(len(tokens) for tokens, _ in drafts)
    tokens = [
        [r, *t, *[-7] * (width - 1 - len(t))] for r, (t, _) in zip(roots, drafts, strict=True)
    ]
    parents = [[-1, *p, *[99] * (width - 1 - len(p))] for _, p in drafts]
    return DraftProposal(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        parents=torch.tensor(parents, dtype=torch.int64),
        num_nodes=[1 + len(t) for t, _ in drafts],
        is_chain=all(p == list(range(len(p))) for _, p in drafts),
    )


def chain(*tokens: int) -> Draft:
    return list(tokens), list(range(len(tokens)))


def run_round(
    target: TableTarget, verifier: Verifier, batch: ScheduleBatch, proposal: DraftProposal
) -> VerifyResult:
    verifier.prepare(batch, proposal)
    result = verifier.accept(target(batch, proposal), batch, proposal)
    for req, tokens in zip(batch.reqs, result.tokens, strict=True):
        req.output_ids += tokens
    return result


def generate(
    target: TableTarget,
    verifier: Verifier,
    reqs: list[Req],
    num_tokens: int,
    draft: Callable[[Req], Draft] = lambda req: ([], []),
) -> list[list[int]]:
    """The first num_tokens output tokens of each request, by rounds of one batch."""
    batch = decode_batch(reqs, target.vocab)
    while min(len(req.output_ids) for req in reqs) < num_tokens:
        batch.sampling.refresh(reqs)
        proposal = propose([req.last_token for req in reqs], [draft(req) for req in reqs])
        run_round(target, verifier, batch, proposal)
    return [req.output_ids[:num_tokens] for req in reqs]
