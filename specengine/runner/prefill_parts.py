"""A prefill of many prompts as several, each of which a graph holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from specengine.core.batch import ModelWorkerBatch
from specengine.core.interfaces import DecoderModel, LogitsOutput
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.linear import LMHead
from specengine.layers.rotary import RotaryEmbedding

# Weights of a layer up to which 2,048 tokens take the device less time (0.25 ms) than the launches
# of a layer take the host (0.4 ms). Beyond, parts would only read the weights several times.
_FEW_WEIGHTS = 32 << 20


def is_launch_bound(model: DecoderModel) -> bool:
    """Whether the launches of many prompts take the host longer than the prompts the device."""
    return weights_a_layer(model) <= _FEW_WEIGHTS


def weights_a_layer(model: DecoderModel) -> float:
    """Numbers, as they are kept: of matrices, but for those over the vocabulary."""
    assert isinstance(model, nn.Module)
    others = VocabEmbedding | LMHead | RotaryEmbedding
    own = (one for one in model.modules() if not isinstance(one, others))
    kept = (chain(one.parameters(recurse=False), one.buffers(recurse=False)) for one in own)
    sizes = [one.numel() for one in chain.from_iterable(kept) if one.dim() > 1]
    return sum(sizes) / model.num_layers


def parts_of(batch: ModelWorkerBatch, tokens: int, requests: int) -> list[ModelWorkerBatch]:
    """Whole requests in their order, in parts of at most so many tokens and requests; a request of
    more tokens is a part by itself. batch: without a tree, of which the head runs on chosen rows;
    the parts carry no sampling."""
    parts = []
    first_token, rows = 0, batch.logits_rows or []
    for start, end in _cuts(batch.extend_lens, tokens, requests):
        count = sum(batch.extend_lens[start:end])
        last_token = first_token + count
        parts.append(
            replace(
                batch,
                input_ids=batch.input_ids[first_token:last_token],
                req_pool_indices=batch.req_pool_indices[start:end],
                prefix_lens=batch.prefix_lens[start:end],
                extend_lens=batch.extend_lens[start:end],
                logits_rows=[row - first_token for row in rows if first_token <= row < last_token],
                sampling=None,
            )
        )
        first_token = last_token
    return parts


def _cuts(lens: Sequence[int], tokens: int, requests: int) -> Iterator[tuple[int, int]]:
    start = taken = 0
    for place, count in enumerate(lens):
        if place > start and (taken + count > tokens or place - start == requests):
            yield start, place
            start, taken = place, 0
        taken += count
    yield start, len(lens)


def kept(output: LogitsOutput) -> LogitsOutput:
    """A copy, which the next replay leaves alone."""
    hidden, features = output.hidden, output.features
    return LogitsOutput(
        output.logits.clone(),
        hidden=None if hidden is None else hidden.clone(),
        features=None if features is None else features.clone(),
    )


def joined(outputs: Sequence[LogitsOutput]) -> LogitsOutput:
    """Of parts, in their order."""
    return LogitsOutput(
        torch.cat([one.logits for one in outputs]),
        hidden=_joined([one.hidden for one in outputs]),
        features=_joined([one.features for one in outputs]),
    )


def _joined(rows: Sequence[Tensor | None]) -> Tensor | None:
    there = [one for one in rows if one is not None]
    return torch.cat(there) if there else None
