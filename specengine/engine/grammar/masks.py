"""The tokens that grammars leave to rows of logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from specengine.core.batch import ScheduleBatch
from specengine.core.grammar import TokenMask
from specengine.core.request import Req
from specengine.core.transfer import sent
from specengine.engine.grammar.state import Chain, LlguidanceState, fill_chains

if TYPE_CHECKING:
    from specengine.core.grammar import GrammarState, Words

Flags = NDArray[np.bool_]


class MaskBuilder:
    """Collects the masks of one forward on the host, and sends them in one copy.

    slots_R has `num_rows` entries; rows that are not added keep every token.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._slots = np.full(num_rows, -1, dtype=np.int32)
        self._width = (vocab_size + 31) // 32
        self._masks: list[Words] = []
        self._chains: list[_Chain] = []

    def add(self, row: int, req: Req, state: GrammarState, depth: int = 0) -> None:
        """`row` decides what follows `state`, `depth` tokens after the request's output."""
        words = np.zeros(self._width, dtype=np.int32)
        state.fill_mask(words)
        _finish(words, req, depth)
        self._slots[row] = len(self._masks)
        self._masks.append(words)

    def add_chain(self, row: int, req: Req, state: LlguidanceState, tokens: list[int]) -> None:
        """The rows from `row` on decide what follows `state` and each of the tokens after it. Those
        behind a token that the grammar forbids keep every token: they are not added."""
        self._chains.append(_Chain(row, req, (state, tokens)))

    def send(self, device: torch.device) -> TokenMask | None:
        if self._chains:
            self._fill_chains()
        if not self._masks:
            return None
        flat = sent(torch.from_numpy(np.concatenate([*self._masks, self._slots])), device)
        size = len(self._masks) * self._width
        return TokenMask(flat[:size].view(-1, self._width), flat[size:])

    @property
    def has_mask_R(self) -> Flags:
        """Once they are sent: which rows were added."""
        return self._slots >= 0

    def _fill_chains(self) -> None:
        counts = [1 + len(chain.drafted[1]) for chain in self._chains]
        words_MW = np.zeros((sum(counts), self._width), dtype=np.int32)
        fill_chains([chain.drafted for chain in self._chains], words_MW)
        first = 0
        for chain, count in zip(self._chains, counts, strict=True):
            for depth, words in enumerate(words_MW[first : first + count]):
                if depth and not words.any():
                    break  # no path leads there
                _finish(words, chain.req, depth)
                self._slots[chain.row + depth] = len(self._masks)
                self._masks.append(words)
            first += count
        self._chains.clear()


@dataclass(frozen=True)
class _Chain:
    row: int
    req: Req
    drafted: Chain


def masked(batch: ScheduleBatch, mask: TokenMask | None) -> ScheduleBatch:
    """The batch as its tokens are chosen under `mask`. The original stays without: drafters read it
    for rows of their own."""
    return batch if mask is None else replace(batch, sampling=replace(batch.sampling, mask=mask))


def masked_prefill(batch: ScheduleBatch) -> ScheduleBatch:
    """With masks for the rows that a prefill samples from: the last of each request that samples.
    On the host; meant to run while the device computes the logits."""
    sampled = [req for req, samples in zip(batch.reqs, batch.samples, strict=True) if samples]
    builder = MaskBuilder(len(sampled), batch.sampling.vocab_size)
    for row, req in enumerate(sampled):
        if req.grammar is not None:
            builder.add(row, req, req.grammar)
    return masked(batch, builder.send(batch.sampling.device))


def _ending_tokens(req: Req, num_output: int) -> set[int]:
    """Tokens that would end the output too early, were the next one of them."""
    is_short = num_output < req.sampling.min_tokens
    tokens = set(req.sampling.stop_token_ids) if is_short else set()
    return tokens | req.eos_ids if is_short or req.sampling.ignore_eos else tokens


def _finish(words: Words, req: Req, depth: int) -> None:
    _withhold(words, _ending_tokens(req, len(req.output_ids) + depth))
    if not words.any():
        # The grammar has failed. Whatever is chosen now, committing it ends the request.
        words.fill(-1)


def _withhold(words: Words, tokens: set[int]) -> None:
    """Forbid `tokens`, unless nothing else is allowed."""
    if not tokens:
        return
    rest = words.view(np.uint32).copy()
    for token in tokens:
        if token < 32 * len(rest):
            rest[token // 32] &= ~np.uint32(1 << token % 32)
    if rest.any():
        words[:] = rest.view(np.int32)
