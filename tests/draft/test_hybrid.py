from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.config import SpecConfig
from specengine.core.draft_context import DraftContext
from specengine.core.drafter import Drafter
from specengine.core.errors import ConfigError
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.spec import DraftProposal, PrefillResult, VerifyResult
from specengine.draft.hybrid import HybridDrafter
from specengine.draft.proposals import Draft, assemble
from specengine.engine.factories import make_drafter
from specengine.kernels.native import suffix
from tests.support.draft_batches import begin, decode_batch, nodes, request, suffix_drafter

VOCAB = 40
COPY = [1, 2, 3, 4, 5, 9, 1, 2]  # with 3 after it, a match of three tokens


class FakeNeural(Drafter):
    """Drafts 11 and 12 below the root, or 11 - 12 in a chain; remembers what it was asked."""

    needs_hidden = True
    drafts_on = "device"
    max_nodes = 3

    def __init__(self, tree: bool = False, probs: bool = False) -> None:
        self.proposes_tree, self.emits_probs = tree, probs
        self.calls: list[tuple[str, Any]] = []

    def begin(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        self.calls.append(("begin", batch.reqs))

    def draft(self, batch: ScheduleBatch) -> DraftProposal:
        self.calls.append(("draft", batch.reqs))
        parents = [-1, 0, 0] if self.proposes_tree else None
        proposal = assemble([Draft([req.last_token, 11, 12], parents) for req in batch.reqs])
        if self.emits_probs:
            shape = (batch.batch_size, 3, VOCAB)
            proposal.draft_probs = torch.full(shape, 1 / VOCAB)
        return proposal

    def observe(self, batch: ScheduleBatch, output: LogitsOutput, result: VerifyResult) -> None:
        self.calls.append(("observe", result))

    def release(self, req: Req) -> None:
        self.calls.append(("release", req))


def hybrid(inner: FakeNeural, min_match: int = 3, **options: Any) -> HybridDrafter:
    return HybridDrafter(inner, suffix_drafter(min_match=min_match, **options))


def test_requests_with_a_long_match_draft_it_and_others_ask_the_model() -> None:
    reqs = [request(COPY, [3]), request([1, 2, 3], [4]), request(COPY, [7])]
    proposal = hybrid(FakeNeural()).draft(decode_batch(reqs))
    assert proposal.num_nodes == [5, 3, 3]
    assert nodes(proposal, 0) == ([3, 4, 5, 9, 1], [-1, 0, 1, 2, 3])
    assert nodes(proposal, 1) == ([4, 11, 12], [-1, 0, 1])
    assert nodes(proposal, 2) == ([7, 11, 12], [-1, 0, 1])
    assert proposal.is_chain
    assert proposal.tokens.shape == proposal.parents.shape == (3, 5)


def test_the_model_does_not_draft_where_all_requests_match() -> None:
    inner, reqs = FakeNeural(), [request(COPY, [3]), request(COPY, [3])]
    made = hybrid(inner)
    proposal = made.draft(decode_batch(reqs))
    assert proposal.num_nodes == [5, 5]
    assert not inner.calls


def test_proposal_is_the_models_where_no_match_is_long() -> None:
    batch = decode_batch([request(COPY, [3]), request([1], [2])])
    for tree in (False, True):
        proposal = hybrid(FakeNeural(tree, probs=True), min_match=4).draft(batch)
        alone = FakeNeural(tree, probs=True).draft(batch)
        assert proposal.tokens.equal(alone.tokens)
        assert proposal.parents.equal(alone.parents)
        assert (proposal.num_nodes, proposal.is_chain) == (alone.num_nodes, not tree)
        assert proposal.draft_probs is not None


def test_the_model_drafts_where_a_long_match_has_no_room() -> None:
    made = HybridDrafter(FakeNeural(), suffix_drafter(lambda req: 1, 3))
    assert made.draft(decode_batch([request(COPY, [3])])).num_nodes == [3]


def test_lookup_chain_stands_beside_a_models_tree() -> None:
    reqs = [request(COPY, [3]), request([1, 2, 3], [4])]
    proposal = hybrid(FakeNeural(tree=True), num_draft_tokens=3).draft(decode_batch(reqs))
    assert not proposal.is_chain
    assert nodes(proposal, 0) == ([3, 4, 5], [-1, 0, 1])
    assert nodes(proposal, 1) == ([4, 11, 12], [-1, 0, 0])
    assert proposal.ranks is None, "which nodes of the tree are the best is not known"


def test_matches_and_chains_have_ranks_and_sampled_drafts_have_none() -> None:
    reqs = [request(COPY, [3]), request([1, 2, 3], [4])]
    proposal = hybrid(FakeNeural()).draft(decode_batch(reqs))
    assert proposal.ranks == [range(5), range(3)]
    assert hybrid(FakeNeural(probs=True)).draft(decode_batch(reqs)).ranks is None
    assert hybrid(FakeNeural(tree=True)).draft(decode_batch(reqs[:1])).ranks == [range(5)]


@pytest.mark.parametrize("width", [2, 5])
def test_a_match_is_certain_among_sampled_drafts(width: int) -> None:
    inner, reqs = FakeNeural(probs=True), [request([1, 2, 3], [4]), request(COPY, [3])]
    proposal = hybrid(inner, num_draft_tokens=width).draft(decode_batch(reqs))
    probs = proposal.draft_probs
    assert probs is not None
    assert probs.shape == (2, max(width, 3), VOCAB)
    assert probs[0, :3].eq(1 / VOCAB).all()
    ours = probs[1, :width]
    assert ours.argmax(-1).tolist() == nodes(proposal, 1)[0]
    assert ours.sum(-1).eq(1).all()
    assert ours.max(-1).values.eq(1).all()


@pytest.mark.parametrize("tree", [False, True])
def test_matches_are_certain_wherever_drafts_are_sampled(tree: bool) -> None:
    """Also where all drafts are matches: the text of a seed must not depend on the batch."""
    batch = decode_batch([request(COPY, [3], 1.0), request(COPY, [3])])
    proposal = hybrid(FakeNeural(tree, probs=True)).draft(batch)
    probs = proposal.draft_probs
    assert probs is not None
    assert probs.shape == (2, 5, batch.sampling.vocab_size)
    assert probs.argmax(-1).equal(proposal.tokens)
    assert probs.sum(-1).eq(1).all()
    assert probs.max(-1).values.eq(1).all()


@pytest.mark.parametrize(("temperature", "probs"), [(0.0, True), (1.0, False)])
def test_matches_have_no_weights_where_no_draft_can_have(temperature: float, probs: bool) -> None:
    batch = decode_batch([request(COPY, [3], temperature)])
    assert hybrid(FakeNeural(probs=probs)).draft(batch).draft_probs is None


def test_confidence_where_both_have_it() -> None:
    class Confident(FakeNeural):
        def draft(self, batch: ScheduleBatch) -> DraftProposal:
            proposal = super().draft(batch)
            proposal.confidence = torch.full((batch.batch_size, 3), 0.5)
            return proposal

    reqs = [request(COPY, [3]), request([1, 2, 3], [4])]
    proposal = hybrid(Confident()).draft(decode_batch(reqs))
    assert proposal.confidence is not None
    assert proposal.confidence.tolist() == [[1.0] * 5, [0.5, 0.5, 0.5, 0.0, 0.0]]
    assert hybrid(FakeNeural()).draft(decode_batch(reqs)).confidence is None


def test_the_model_observes_rounds_that_it_did_not_draft() -> None:
    inner, req = FakeNeural(), request(COPY, [3])
    made: Drafter = hybrid(inner)
    begin(made, req)
    made.draft(decode_batch([req]))
    result = VerifyResult([[4, 5]], [1], [4], None)
    made.observe(decode_batch([req]), LogitsOutput(torch.empty(0, VOCAB)), result)
    made.release(req)
    assert [name for name, _ in inner.calls] == ["begin", "observe", "release"]
    assert inner.calls[1][1] is result


class AsyncNeural(FakeNeural):
    begins_async = True

    def begin_async(
        self, batch: ScheduleBatch, output: LogitsOutput, tokens_S: torch.Tensor
    ) -> None:
        self.calls.append(("begin async", tokens_S))

    def captures(self) -> Iterator[Callable[[], object]]:
        yield lambda: self.calls.append(("capture", None))

    def precompile_calls(self) -> Iterator[Callable[[], object]]:
        yield lambda: self.calls.append(("precompile", None))


def test_begins_async_where_the_model_does() -> None:
    made, inner, req = hybrid(FakeNeural()), AsyncNeural(), request(COPY, [3])
    assert not made.begins_async
    made = hybrid(inner)
    assert made.begins_async
    tokens_S = torch.tensor([3])
    made.begin_async(decode_batch([req]), LogitsOutput(torch.empty(0, VOCAB)), tokens_S)
    assert inner.calls == [("begin async", tokens_S)]
    made.index_ahead(req, 99)
    assert made.suffix._texts[req].num_tokens == len(COPY) + 1


def test_captures_are_the_models() -> None:
    made, inner = hybrid(FakeNeural()), AsyncNeural()
    assert not [*made.captures()]
    for capture in hybrid(inner).captures():
        capture()
    for call in hybrid(inner).precompile_calls():
        call()
    assert inner.calls == [("capture", None), ("precompile", None)]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_suffixes_draft_long_matches_alone_in_any_batch(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, together, and before the emitted tokens are committed."""
    if not is_compiled:
        monkeypatch.setattr(suffix, "is_compiled", lambda: False)
    reqs = [request(COPY, [3]), request([1, 2, 3], [4]), request([7, 3, 8], [3])]
    assert suffix_drafter().draft(decode_batch(reqs)).num_nodes == [5, 1, 5]
    made, ahead = suffix_drafter(min_match=3), suffix_drafter(min_match=3)
    proposal = made.draft(decode_batch(reqs))
    assert [nodes(proposal, place)[0] for place in range(3)] == [[3, 4, 5, 9, 1], [4], [3]]
    assert [len(made.draft_one(req).tokens) for req in reqs] == [5, 1, 1]
    before = [request(req.prompt_ids) for req in reqs]
    emitted = [req.output_ids for req in reqs]
    early = ahead.draft_ahead(before, emitted, [5] * 3)
    assert [nodes(early, place) for place in range(3)] == [nodes(proposal, i) for i in range(3)]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_may_match_where_a_match_can_become_long_enough(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COPY and 3 is a match of three tokens."""
    if not is_compiled:
        monkeypatch.setattr(suffix, "is_compiled", lambda: False)
    long, none = request(COPY, [3]), request([1, 2, 3], [4])
    made = suffix_drafter(min_match=6)
    for reqs, longest in (([none, long], 3), ([none], 0), ([long], 3), ([long, none], 3)):
        for count in range(1, 7):
            assert made.may_match(reqs, count) == (longest + count >= 6)
    assert suffix_drafter(min_match=6, suffix_shared_corpus=True).may_match([none], 1)


def test_capabilities_are_those_of_both_drafters() -> None:
    made = hybrid(FakeNeural(probs=True), suffix_branches=2, num_draft_tokens=8)
    assert (made.needs_hidden, made.emits_probs) == (True, True)
    assert made.proposes_tree
    assert made.max_nodes == 8
    assert not hybrid(FakeNeural()).proposes_tree
    assert hybrid(FakeNeural(tree=True)).proposes_tree


def test_hybrid_flag_wraps_the_algorithms_drafter() -> None:
    spec = SpecConfig(
        algorithm="NGRAM", num_draft_tokens=8, hybrid_suffix=True, hybrid_suffix_min_match=5
    )
    made = make_drafter(DraftContext(spec, lambda req: 100, (), 8, torch.device("cpu")))
    assert isinstance(made, HybridDrafter)
    assert made.suffix.min_match == 5


@pytest.mark.parametrize("algorithm", [None, "SUFFIX"])
def test_hybrid_flag_needs_another_drafter(algorithm: str | None) -> None:
    spec = SpecConfig(algorithm=algorithm, num_draft_tokens=8, hybrid_suffix=True)
    with pytest.raises(ConfigError, match="--speculative-hybrid-suffix"):
        make_drafter(DraftContext(spec, lambda req: 100, (), 8, torch.device("cpu")))
