"""Batches of bare requests for drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from specengine.core.batch import ScheduleBatch
from specengine.core.config import SpecConfig
from specengine.core.drafter import Drafter
from specengine.core.forward_mode import ForwardMode
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import FinishReason, Req, ReqState
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.core.spec import DraftProposal, PrefillResult
from specengine.draft.ngram.drafter import NgramDrafter
from specengine.draft.suffix.drafter import SuffixDrafter
from specengine.kernels.native.texts import COUNT, NativeText


def request(prompt: list[int], output: list[int] | None = None, temperature: float = 0.0) -> Req:
    params = SamplingParams(temperature=temperature)
    return Req("r", prompt, params, output_ids=list(output or []))


def depth_of(parents: list[int], node: int) -> int:
    """The root has 0."""
    return 0 if node == 0 else 1 + depth_of(parents, parents[node])


def finish(req: Req) -> None:
    req.state, req.finish_reason = ReqState.FINISHED, FinishReason("stop")


def decode_batch(reqs: list[Req]) -> ScheduleBatch:
    return ScheduleBatch(
        reqs=reqs,
        forward_mode=ForwardMode.DECODE,
        input_ids=[req.last_token for req in reqs],
        prefix_lens=[req.seq_len - 1 for req in reqs],
        extend_lens=[1] * len(reqs),
        samples=[True] * len(reqs),
        sampling=SamplingBatch.from_reqs(reqs, 100, torch.device("cpu")),
    )


def begin(drafter: Drafter, req: Req) -> None:
    """As after a prefill; drafters without a model do not look at its output."""
    drafter.begin(
        decode_batch([req]), LogitsOutput(torch.empty(0, 100)), PrefillResult([None], [None], [[]])
    )


def drafter(limit: Callable[[Req], int] = lambda req: 1000, **options: Any) -> NgramDrafter:
    spec = {"num_draft_tokens": 5, "ngram_min_match": 2, "ngram_max_match": 4, **options}
    return NgramDrafter(SpecConfig(algorithm="NGRAM", **spec), limit)


def suffix_drafter(
    limit: Callable[[Req], int] = lambda req: 1000, min_match: int = 0, **options: Any
) -> SuffixDrafter:
    spec = {"num_draft_tokens": 5, "suffix_factor": 9.0, **options}
    return SuffixDrafter(SpecConfig(algorithm="SUFFIX", **spec), limit, min_match)


def growing(
    rounds: list[list[list[int]]],
    first: int,
    root: int,
    ours: NgramDrafter | SuffixDrafter,
    data: st.DataObject,
) -> Iterator[ScheduleBatch]:
    """Batches of some of three requests, whose texts grow, and are read by `ours` piece by piece.
    rounds: the tokens of each request, round by round, its prompt first. first: the least token."""
    reqs = [request([first + token for token in text], [root]) for text in rounds[0]]
    for new in rounds[1:]:
        for req, tokens in zip(reqs, new, strict=True):
            req.output_ids += [first + token for token in tokens]
        taken = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        ours.index_ahead(reqs[taken[0]], data.draw(st.integers(0, 9)))
        yield decode_batch([reqs[place] for place in taken])


@contextmanager
def short_of_memory(kind: type[NativeText], taken: list[int]) -> Iterator[None]:
    """Each text of a batch takes so many tokens of what it is given."""
    given = kind.functions

    def extend(pointers: int, tokens: int, counts: int, num_texts: int) -> int:
        num_new = (COUNT * num_texts).from_address(counts)
        short = next(place for place, count in enumerate(taken) if count < num_new[place])
        num_new[:] = taken
        given("texts_extend")(pointers, tokens, counts, num_texts)
        return short

    def function(name: str) -> Any:
        return extend if name == "texts_extend" else given(name)

    with patch.object(kind, "functions", staticmethod(function)):
        yield


def nodes(proposal: DraftProposal, i: int = 0) -> tuple[list[int], list[int]]:
    """Tokens and parents of request i, without padding."""
    count = proposal.num_nodes[i]
    return proposal.tokens[i, :count].tolist(), proposal.parents[i, :count].tolist()
