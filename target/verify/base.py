"""What every verifier does alike: the batch to verify, and the result of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from specengine.core.batch import ModelWorkerBatch, ScheduleBatch
from specengine.core.config import SpecConfig
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import TokenLogprob
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.core.transfer import sent
from specengine.core.tree import Tree
from specengine.layers.logprobs import token_logprobs
from specengine.layers.sampler import Sample, Sampler
from specengine.target.verify.rows import ancestors
from specengine.target.verify.tree import depths, flat_nodes
from specengine.target.verify.walk import Walk

DeviceRule = Literal["match", "stochastic", "relaxed"]
_DECIDES = {"accept", "walks", "decide", "decide_on_host"}


class TreeVerifier(ABC):
    """A Verifier whose rule gives the accepted path of each tree, and the token after it."""

    takes_trees = True  # or chains alone
    needs_draft_probs = False
    is_lossy = False
    text_depends_on_drafts = False  # the tokens of a seed depend on which drafts were verified
    sampler: Sample = Sampler()  # chooses the target's tokens; an engine gives its runner's
    # How rounds on the device decide as this rule does: "match" by the target's tokens alone;
    # "stochastic" and "relaxed" by the methods of that verifier in engine/round/rules.py. None: not
    # at all, and rounds run on the host.
    device_rule: DeviceRule | None = None
    # Whether rounds on the device need the target's logits still after tokens were sampled from
    # them: a row of the vocabulary more for each node, in the memory that is set aside for graphs.
    keeps_logits = True

    def __init_subclass__(cls) -> None:
        """A class that decides otherwise than the one it extends, by methods of its own or of a
        mixin, must declare its own device_rule and keeps_logits: rounds on the device would go on
        to decide as that one does, and in its memory."""
        super().__init_subclass__()
        if not cls._declares("device_rule"):
            cls.device_rule = None
        if not cls._declares("keeps_logits"):
            cls.keeps_logits = True

    @classmethod
    def _declares(cls, field: str) -> bool:
        """Whether nothing that decides was overridden since the field was declared."""
        declares = next(base for base in cls.__mro__ if field in vars(base))
        nearer = cls.__mro__[: cls.__mro__.index(declares)]
        return not any(_DECIDES & vars(base).keys() for base in nearer)

    @classmethod
    def from_spec(cls, spec: SpecConfig) -> Self:
        """As --speculative-verify makes it."""
        return cls()

    def prepare(self, batch: ScheduleBatch, proposal: DraftProposal) -> ModelWorkerBatch:
        """A plain DECODE without drafts, else TARGET_VERIFY over the nodes that exist."""
        worker_batch = batch.get_model_worker_batch()
        if proposal.is_empty:
            return worker_batch
        nodes = flat_nodes(proposal.num_nodes, proposal.tokens.shape[1])
        nodes = sent(nodes, proposal.tokens.device)
        return replace(
            worker_batch,
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=proposal.tokens.reshape(-1)[nodes],
            extend_lens=list(proposal.num_nodes),
            tree=None if proposal.is_chain else _tree(proposal, nodes),
        )

    def accept(
        self, output: LogitsOutput, batch: ScheduleBatch, proposal: DraftProposal
    ) -> VerifyResult:
        """`output` has a row a node, in the order that prepare gave."""
        walks = self.walks(output, batch.sampling, proposal)
        return VerifyResult(
            tokens=[walk.tokens for walk in walks],
            num_accepted=[len(walk.tokens) - 1 for walk in walks],
            num_drafted=proposal.num_drafted,
            kv_keep=None if proposal.is_chain else [walk.nodes for walk in walks],
            logprobs=_logprobs(output.logits, batch.sampling, proposal, walks),
            is_lossy=self.is_lossy,
        )

    @abstractmethod
    def walks(
        self, output: LogitsOutput, sampling: SamplingBatch, proposal: DraftProposal
    ) -> list[Walk]:
        """The rule, for every request of the batch."""


def _tree(proposal: DraftProposal, nodes: Tensor) -> Tree:
    mask_BNN = ancestors(proposal)
    return Tree(depths_T=depths(mask_BNN).view(-1)[nodes], mask_BNN=mask_BNN)


def _logprobs(
    logits_TV: Tensor, sampling: SamplingBatch, proposal: DraftProposal, walks: list[Walk]
) -> list[list[TokenLogprob]] | None:
    """Beside the emitted tokens; an empty list for each request that asks for none."""
    if sampling.max_logprobs is None:
        return None
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    asked = [count is not None for count in sampling.logprobs]
    start = 0
    for walk, count, num_nodes in zip(walks, sampling.logprobs, proposal.num_nodes, strict=True):
        if count is not None:
            rows += [start + node for node in walk.nodes]
            tokens += walk.tokens
            counts += [count] * len(walk.nodes)
        start += num_nodes
    index = torch.tensor([rows, tokens], device=logits_TV.device)
    found = iter(token_logprobs(logits_TV, index[0], index[1], counts))
    return [
        [next(found) for _ in walk.nodes] if asks else []
        for walk, asks in zip(walks, asked, strict=True)
    ]
