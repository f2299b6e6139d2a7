"""Sampling parameters of requests, in tables on the device by row of the page table."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.choice_words import choice_words
from specengine.core.random_streams import Stream
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.transfer import sent
from specengine.engine.round.edits import MAX_EDITING, LogitEditState, edits_logits
from specengine.kernels.sample.types import SEED, SHIFT, TEMPERATURE, ChoiceTable, DrawPlaces
from specengine.kernels.sample.weigh_rows import weigh_rows
from specengine.layers.sampler import RowDraws


class SamplingFeatures(NamedTuple):
    """What a round must be able to do for its requests, beside taking the best token. A round that
    edits, masks or reports logprobs can sample as well, so that there are fewer kinds.

    stochastic: the rule decides by more than the tokens that the target chose. Most rules do so
    only where a request samples.
    """

    samples: bool = False
    edits: bool = False
    logprobs: bool = False
    masks: bool = False
    stochastic: bool = False


PLAIN = SamplingFeatures()


class SamplingState:
    """Temperature, top-k, top-p, min-p and seed by row of the page table, written when a request
    comes to a row; and the logit edits of requests. The position in the output follows from the
    length that the round goes by."""

    def __init__(
        self,
        num_rows: int,
        context: int,
        vocab_size: int,
        device: torch.device,
        stochastic: bool = False,
        stochastic_greedy: bool = False,
    ) -> None:
        """context: the most tokens of a request. stochastic: whether batches in which a request
        samples need the round's rule. stochastic_greedy: whether batches of greedy requests do."""
        self.stochastic = stochastic
        self.stochastic_greedy = stochastic_greedy
        self.context = context
        self.table = ChoiceTable.of(num_rows, device)
        # By row: tokens, prompt and output together, at which requests end at the latest.
        self.ends = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.edits = LogitEditState(num_rows, vocab_size, device)
        self.vocab_size = vocab_size
        self._owners: list[Req | None] = [None] * num_rows
        self._reqs: list[Req] = []  # whose features were found last
        self._features = PLAIN

    def features_of(self, reqs: list[Req]) -> SamplingFeatures:
        """Found once for rounds of the same requests: of all features only edits end before the
        request does, with min_tokens."""
        if self._features.edits or self._reqs != reqs:
            self._reqs, self._features = reqs, self._find_features(reqs)
        return self._features

    def _find_features(self, reqs: list[Req]) -> SamplingFeatures:
        edits = any(map(edits_logits, reqs))
        logprobs = any(req.sampling.logprobs is not None for req in reqs)
        masks = any(req.grammar is not None for req in reqs)
        all_greedy = all(req.sampling.is_greedy for req in reqs)
        samples = edits or logprobs or masks or not all_greedy
        stochastic = self.stochastic_greedy if all_greedy else self.stochastic
        return SamplingFeatures(samples, edits, logprobs, masks, stochastic)

    @property
    def greedy(self) -> SamplingFeatures:
        """Features of greedy requests without any other feature."""
        return SamplingFeatures(stochastic=self.stochastic_greedy)

    @property
    def sampled(self) -> SamplingFeatures:
        """Features of requests that sample, without any other feature."""
        return SamplingFeatures(samples=True, stochastic=self.stochastic)

    def fits(self, reqs: list[Req]) -> bool:
        """Whether there are tables for all edits."""
        return sum(map(edits_logits, reqs)) <= MAX_EDITING

    def write(self, reqs: list[Req], rows_B: Tensor, features: SamplingFeatures) -> None:
        """Before the launch of a round of these requests. rows_B: of the page table, on the
        device."""
        if features != PLAIN:
            self._write_words([(req.row, req) for req in reqs if self._owners[req.row] is not req])
        if features.edits:
            self.edits.write(reqs, rows_B)

    def _write_words(self, new: list[tuple[int, Req]]) -> None:
        if not new:
            return
        words = choice_words([req for _, req in new], self.vocab_size)
        # A round's length leaves out its root, which is the last token.
        words[:, SHIFT] = [1 - len(req.prompt_ids) for _, req in new]
        rows, ends = [row for row, _ in new], [end_of(req, self.context) for _, req in new]
        columns = torch.from_numpy(np.column_stack([rows, ends, words]))
        packed = sent(columns, self.table.words.device)
        self.ends[packed[:, 0]], self.table.words[packed[:, 0]] = packed[:, 1], packed[:, 2:]
        for row, req in new:
            self._owners[row] = req

    def draws(self, rows: RowBatch, batch: ForwardBatch, in_place: bool = True) -> RowDraws:
        """The sampling parameters of the nodes of the verification `batch`. in_place: their edited
        logits may be written over."""
        nodes = batch.num_tokens // len(rows.rows_B)
        depths_R = None if batch.tree is None else batch.tree.depths_T
        places = DrawPlaces(rows.rows_B, rows.lens_B, nodes, depths_R)
        return RowDraws(self.table, places, in_place)

    def target_weights(self, logits_TV: Tensor, rows: RowBatch) -> Tensor:
        """float32 [T, V], written over edited logits: what plain decoding samples from after each
        node; all on the best token for greedy requests."""
        places = DrawPlaces(rows.rows_B, rows.lens_B, len(logits_TV) // len(rows.rows_B))
        weigh_rows(logits_TV, self.table, places, int(Stream.SAMPLE))
        return logits_TV

    def are_greedy(self, rows: RowBatch) -> Tensor:
        """bool [B]."""
        return self.table.column(TEMPERATURE).index_select(0, rows.rows_B) == 0.0

    def keys(self, rows: RowBatch) -> tuple[Tensor, Tensor]:
        """int64 [B] each: the seeds that the uniforms of a round are keyed by, and the positions of
        the next output token."""
        words_B = self.table.words.index_select(0, rows.rows_B)
        return words_B[:, SEED], rows.lens_B + words_B[:, SHIFT]

    def count(
        self, rows: RowBatch, tokens_BN: Tensor, accepted_B: Tensor, features: SamplingFeatures
    ) -> None:
        """The tokens that a round emitted, for penalties."""
        if features.edits:
            self.edits.count(rows, tokens_BN, accepted_B)


def end_of(req: Req, context: int) -> int:
    """Tokens that a request has at most, as SchedulePolicy.remaining_tokens counts."""
    limit = req.sampling.max_tokens
    return context if limit is None else min(context, len(req.prompt_ids) + limit)


def rows_of(reqs: list[Req]) -> list[int]:
    """Rows of the page table."""
    rows = [req.req_pool_idx for req in reqs]
    assert None not in rows, "a request has no row in the request pool"
    return cast(list[int], rows)
