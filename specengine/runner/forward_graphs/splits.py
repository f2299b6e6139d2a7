"""Which prefills take the host longer to launch than the device to run; splits one of many prompts
into several, each of which fits a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from specengine.core.batch import ModelWorkerBatch
from specengine.core.model import DecoderModel
from specengine.core.parallel import Communicator, NoLink
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.experts import Experts
from specengine.layers.linear import LMHead
from specengine.layers.module import Module
from specengine.layers.rotary import RotaryEmbedding

# Weights of a layer up to which 2,048 tokens take the device less time (0.25 ms) than a layer's
# launches take the host (0.4 ms). Above, splitting would only read the weights several times.
_LAUNCH_BOUND_WEIGHTS = 32 << 20
# Tokens x weights of a layer that the device multiplies (0.8 ms of an H200) in the time in which
# the host launches a layer with FlashAttention (0.7 ms, 1.0 with experts), and a little more:
# padding takes time too.
_LAUNCH_BOUND_WORK = 1 << 38
# A weight of an expert takes the device as long as so many others. Measured on an H200: 1,024
# tokens take a layer of Qwen3-30B-A3B 0.40 ms, and one of 8B, with 3.8 times the weights that one
# row is multiplied with, 0.76.
_WORK_OF_EXPERTS = 2
# With up to twice that work a graph still gains 3% (GPT-OSS-20B takes 38.4 ms for 39.7 of 2,048
# tokens). It serves prefills of which padding would be no more: one token of so many.
_PADDING_SHARE = 32
# Tokens above which a prefill may have half of the work: there attention, whose work grows with the
# square of the prompt and is not counted, takes a small layer as long as its products. 135M gains
# at 4,096 tokens (an eager forward takes 15.4 ms, one in pieces 6.4), 8B and Qwen3-30B-A3B do not.
_LONG = 2048


def is_launch_bound(model: DecoderModel, ranks: Communicator = NoLink.communicator) -> bool:
    """Whether launching a large prefill takes the host longer than running it takes the device, of
    the ranks that share the model the one that has most of it."""
    return _most_weights(model, ranks) <= _LAUNCH_BOUND_WEIGHTS


def most_padding(
    sizes: Sequence[int], model: DecoderModel, ranks: Communicator = NoLink.communicator
) -> dict[int, int | None]:
    """Of prefills of so many tokens those that gain in a graph, with the padding tokens that each
    may have: any number (None) where launches take the host as long as the device takes for the
    tokens, or longer."""
    work, found = ranks.greatest([round(work_per_row(model))])[0], dict[int, int | None]()
    for count in sizes:
        share = count * work / _LAUNCH_BOUND_WORK
        if share <= (1 if count <= _LONG else 1 / 2):
            found[count] = None
        elif share <= 2 and count <= _LONG:
            found[count] = count // _PADDING_SHARE
    return found


def _most_weights(model: DecoderModel, ranks: Communicator) -> int:
    return ranks.greatest([round(weights_per_layer(model))])[0]


def weights_per_layer(model: DecoderModel) -> float:
    """Elements of a layer's matrices, whatever they are kept as; embedding, head and rotary tables
    not counted."""
    return sum(one.own_weights for one in _own_modules(model)) / model.num_layers


def work_per_row(model: DecoderModel) -> float:
    """The same of those that one row is multiplied with: of a mixture's experts the chosen ones,
    each element of which counts _WORK_OF_EXPERTS times."""
    modules = _own_modules(model)
    return sum(one.own_weights * _share_of_row(one) for one in modules) / model.num_layers


def _share_of_row(module: Module) -> float:
    if isinstance(module, Experts):
        return _WORK_OF_EXPERTS * module.num_chosen / module.count
    return 1.0


def _own_modules(model: DecoderModel) -> Iterator[Module]:
    assert isinstance(model, nn.Module)
    others = VocabEmbedding | LMHead | RotaryEmbedding
    modules = (one for one in model.modules() if isinstance(one, Module))
    return (one for one in modules if not isinstance(one, others))


def split(batch: ModelWorkerBatch, tokens: int, requests: int) -> list[ModelWorkerBatch]:
    """Parts of whole requests, in order, each of at most so many tokens and requests; a request
    with more tokens is a part by itself. batch: without a tree, with logits_rows. The parts carry
    no sampling."""
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
    for index, count in enumerate(lens):
        if index > start and (taken + count > tokens or index - start == requests):
            yield start, index
            start, taken = index, 0
        taken += count
    yield start, len(lens)
