"""The tokens that grammars allow after the nodes of rounds on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.request import Req
from specengine.engine.draft_nodes import HostTree
from specengine.engine.grammar.drafts import add_masks
from specengine.engine.grammar.masks import Flags, MaskBuilder
from specengine.kernels.sample.apply_token_bitmask import apply_token_bitmask


class TokenMasks:
    """A mask for each node of requests with a grammar, in buffers that graphs read. The buffers are
    made when a request first has a grammar."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """num_rows: nodes of the largest round."""
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.device = device
        self._words: Tensor | None = None  # int32 [num_rows, W]
        self._slots: Tensor | None = None  # int32 [num_rows], of _words; -1 where all is allowed

    def prepare(self) -> None:
        """Before a graph is captured that reads masks."""
        if self._words is None:
            shape = self.num_rows, (self.vocab_size + 31) // 32
            self._words = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._slots = torch.full(shape[:1], -1, dtype=torch.int32, device=self.device)

    def send(self, reqs: list[Req], trees: list[HostTree]) -> Flags:
        """Before the tokens of a round are chosen. trees: its drafts, all of N nodes. Returns
        [B, N], the nodes that grammars allow; all nodes of a request without one."""
        assert self._words is not None
        assert self._slots is not None
        nodes = len(trees[0].tokens)
        builder = MaskBuilder(len(reqs) * nodes, self.vocab_size)
        for index, (req, tree) in enumerate(zip(reqs, trees, strict=True)):
            if is_constrained(req):
                add_masks(builder, index * nodes, req, tree)
        self._slots.fill_(-1)
        mask = builder.send(self.device)
        if mask is not None:
            self._words[: len(mask.words_MW)].copy_(mask.words_MW)
            self._slots[: len(mask.slots_R)].copy_(mask.slots_R)
        legal_BN: Flags = builder.has_mask_R.reshape(len(reqs), nodes)
        legal_BN[[not is_constrained(req) for req in reqs]] = True
        return legal_BN

    def apply(self, logits_RV: Tensor) -> Tensor:
        """A copy, float32 [R, V], in which what is forbidden is -inf."""
        assert self._words is not None
        assert self._slots is not None
        return apply_token_bitmask(logits_RV, self._words, self._slots[: len(logits_RV)])


def is_constrained(req: Req) -> bool:
    """By a grammar. A request that has ended may still be in a round."""
    return req.grammar is not None and not req.is_finished
