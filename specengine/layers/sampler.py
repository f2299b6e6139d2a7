"""Chooses tokens from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from specengine.core.interfaces import LogitsOutput
from specengine.core.random_streams import Stream, draw
from specengine.core.sampling_batch import RandomParams, SamplingBatch
from specengine.layers.logits import RowMap, edit_logits, row_chunks, target_weights

_ONE_TO_ONE = RowMap()
_FIXED_POINT = 2.0**50


class Sampler:
    """The one place where the target's tokens are chosen, plain decoding and verification alike.

    A greedy request takes the best token, the lowest id among equals. Any other inverts the
    cumulative distribution at one uniform keyed by its seed and the output position decided.
    """

    def __call__(
        self, output: LogitsOutput, sampling: SamplingBatch, rows: RowMap = _ONE_TO_ONE
    ) -> Tensor:
        """-> int64 [R], one token a row of output.logits."""
        logits = output.logits
        if sampling.is_plain:
            return output.argmax if output.argmax is not None else logits.argmax(-1)
        chunks = list(row_chunks(*logits.shape))
        if len(chunks) <= 1:
            return self._choose(logits, sampling, rows)
        parts = [rows.part(chunk, len(logits), logits.device) for chunk in chunks]
        tokens = [
            self._choose(logits[chunk], sampling, part)
            for chunk, part in zip(chunks, parts, strict=True)
        ]
        return torch.cat(tokens)

    def _choose(self, logits_RV: Tensor, sampling: SamplingBatch, rows: RowMap) -> Tensor:
        logits_RV = edit_logits(logits_RV, sampling, rows)
        random = sampling.random
        if random is None:
            return logits_RV.argmax(-1)
        weights_RV = target_weights(logits_RV, random, rows)
        tokens = invert_cdf(weights_RV, self._uniforms(random, sampling, rows))
        if random.any_greedy:
            tokens = torch.where(rows.per_row(random.greedy), logits_RV.argmax(-1), tokens)
        return tokens

    def _uniforms(self, random: RandomParams, sampling: SamplingBatch, rows: RowMap) -> Tensor:
        """float64 [R] in [0, 1)."""
        return draw(rows.per_row(random.seeds), rows.output_pos(sampling), Stream.SAMPLE)


def invert_cdf(weights_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds ``uniform * total``, int64 [R].

    weights_RV: float32, at least 0, summing up to at most about 1 a row. Sums are taken in integers
    (units of 2^-50), which are exact in any order: the result is the same on every device, and is
    never a token of weight 0.
    """
    cumulative = (weights_RV.double() * _FIXED_POINT).long().cumsum(-1)
    total = cumulative[:, -1:]
    threshold = (uniforms_R[:, None] * total).long().minimum(total - 1)
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return index.clamp(max=weights_RV.shape[-1] - 1)
