"""Logprobs of the tokens that rounds on the device choose."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.request import Req, TokenLogprob
from specengine.core.sampling import MAX_LOGPROBS
from specengine.core.transfer import pinned
from specengine.layers.logprobs import pack_logprobs, unpack_logprobs


class DeviceLogprobs:
    """Logprobs of the token at every node of a path, with as many alternatives as a request may ask
    for. Rounds take turns with two halves of a buffer on the host. The buffers are made when a
    request first asks."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """num_rows: nodes of the largest round."""
        self.num_rows = num_rows
        self.most = min(MAX_LOGPROBS, vocab_size)
        self.device = device
        self._table: Tensor | None = None  # float64 [num_rows, W]
        self._on_host: Tensor | None = None  # [2, num_rows, W]

    def prepare(self) -> None:
        """Before a graph is captured that takes logprobs."""
        if self._table is None:
            shape = self.num_rows, 2 + 2 * self.most
            self._table = torch.zeros(shape, dtype=torch.float64, device=self.device)
            on_host = torch.zeros(2, *shape, dtype=torch.float64)
            self._on_host = pinned(on_host, self.device)

    def take(self, logits_TV: Tensor, tokens_T: Tensor) -> None:
        """logits_TV: raw, float32, a row a node of the paths."""
        assert self._table is not None
        self._table[: len(tokens_T)] = pack_logprobs(logits_TV, tokens_T, self.most)

    def send(self, turn: int) -> None:
        assert self._table is not None
        assert self._on_host is not None
        self._on_host[turn].copy_(self._table, non_blocking=True)

    def read(
        self, turn: int, reqs: list[Req], nodes: int, tokens: list[list[int]]
    ) -> list[list[TokenLogprob]]:
        """Beside the emitted tokens of a collected round, in paths of so many nodes; an empty list
        for each request that asks for none."""
        assert self._on_host is not None
        found = []
        for index, (req, emitted) in enumerate(zip(reqs, tokens, strict=True)):
            count = req.sampling.logprobs
            rows = self._on_host[turn, index * nodes : index * nodes + len(emitted)]
            asked = [] if count is None else rows.tolist()
            found.append(unpack_logprobs(asked, [count or 0] * len(asked)))
        return found
