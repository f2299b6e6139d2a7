from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.config import SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.spec import (
    Drafter,
    DraftProposal,
    EarlyDrafter,
    PrefillResult,
    PreparingDrafter,
    VerifyResult,
)
from specengine.draft.hybrid import HybridDrafter
from specengine.draft.proposals import Draft, assemble
from specengine.engine.registry import DraftContext, make_drafter
from specengine.kernels.native import suffix
from tests.draft.drafting import decode_batch, nodes, request, seed, suffix_drafter

VOCAB = 40
COPY = [1, 2, 3, 4, 5, 9, 1, 2]  # with 3 after it, a match of three tokens


class FakeNeural:
    """Drafts 11 and 12 below the root, or 11 - 12 in a chain; remembers what it was asked."""

    needs_hidden = writes_kv = True
    max_nodes = 3

    def __init__(self, tree: bool = False, probs: bool = False) -> None:
        self.proposes_tree, self.emits_probs = tree, probs
        self.calls: list[tuple[str, Any]] = []

    def seed(self, batch: ScheduleBatch, output: LogitsOutput, result: PrefillResult) -> None:
        self.calls.append(("seed", batch.reqs))

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


def test_each_request_goes_its_own_way() -> None:
    reqs = [request(COPY, [3]), request([1, 2, 3], [4]), request(COPY, [7])]
    proposal = hybrid(FakeNeural()).draft(decode_batch(reqs))
    assert proposal.num_nodes == [5, 3, 3]
    assert nodes(proposal, 0) == ([3, 4, 5, 9, 1], [-1, 0, 1, 2, 3])
    assert nodes(proposal, 1) == ([4, 11, 12], [-1, 0, 1])
    assert nodes(proposal, 2) == ([7, 11, 12], [-1, 0, 1])
    assert proposal.is_chain
    assert proposal.tokens.shape == proposal.parents.shape == (3, 5)


def test_the_other_drafter_is_not_asked_where_all_copy() -> None:
    inner, reqs = FakeNeural(), [request(COPY, [3]), request(COPY, [3])]
    made = hybrid(inner)
    proposal = made.draft(decode_batch(reqs))
    assert proposal.num_nodes == [5, 5]
    assert not inner.calls


def test_without_a_long_match_nothing_changes() -> None:
    batch = decode_batch([request(COPY, [3]), request([1], [2])])
    for tree in (False, True):
        proposal = hybrid(FakeNeural(tree, probs=True), min_match=4).draft(batch)
        alone = FakeNeural(tree, probs=True).draft(batch)
        assert proposal.tokens.equal(alone.tokens)
        assert proposal.parents.equal(alone.parents)
        assert (proposal.num_nodes, proposal.is_chain) == (alone.num_nodes, not tree)
        assert proposal.draft_probs is not None


def test_a_long_match_with_no_room_is_left_to_the_other() -> None:
    made = HybridDrafter(FakeNeural(), suffix_drafter(lambda req: 1, 3))
    assert made.draft(decode_batch([request(COPY, [3])])).num_nodes == [3]


def test_a_chain_beside_a_tree() -> None:
    reqs = [request(COPY, [3]), request([1, 2, 3], [4])]
    proposal = hybrid(FakeNeural(tree=True), num_draft_tokens=3).draft(decode_batch(reqs))
    assert not proposal.is_chain
    assert nodes(proposal, 0) == ([3, 4, 5], [-1, 0, 1])
    assert nodes(proposal, 1) == ([4, 11, 12], [-1, 0, 0])
    assert proposal.ranks is None, "of the tree nobody knows which nodes are the best"


def test_the_best_nodes_of_suffixes_are_known_and_those_of_chains() -> None:
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
    """Also where nobody's was: what a seed says must not follow from who else is in the batch."""
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


def test_the_other_drafter_sees_everything_else() -> None:
    inner, req = FakeNeural(), request(COPY, [3])
    made: Drafter = hybrid(inner)
    seed(made, req)
    made.draft(decode_batch([req]))
    result = VerifyResult([[4, 5]], [1], [4], None)
    made.observe(decode_batch([req]), LogitsOutput(torch.empty(0, VOCAB)), result)
    made.release(req)
    assert [name for name, _ in inner.calls] == ["seed", "observe", "release"]
    assert inner.calls[1][1] is result


class EarlyNeural(FakeNeural):
    seeds_early = True

    def seed_early(
        self, batch: ScheduleBatch, output: LogitsOutput, tokens_S: torch.Tensor
    ) -> None:
        self.calls.append(("seed early", tokens_S))

    def captures(self) -> Iterator[Callable[[], object]]:
        yield lambda: self.calls.append(("capture", None))


def test_prompts_are_read_while_the_prefill_runs_where_the_other_can() -> None:
    made, inner, req = hybrid(FakeNeural()), EarlyNeural(), request(COPY, [3])
    assert isinstance(made, EarlyDrafter)
    assert not made.seeds_early
    made = hybrid(inner)
    assert made.seeds_early
    tokens_S = torch.tensor([3])
    made.seed_early(decode_batch([req]), LogitsOutput(torch.empty(0, VOCAB)), tokens_S)
    assert inner.calls == [("seed early", tokens_S)]
    made.study(req, 99)
    assert made.suffix._texts[req].num_tokens == len(COPY) + 1


def test_graphs_of_the_other_are_captured_while_idle() -> None:
    made, inner = hybrid(FakeNeural()), EarlyNeural()
    assert isinstance(made, PreparingDrafter)
    assert not [*made.captures()]
    for capture in hybrid(inner).captures():
        capture()
    assert inner.calls == [("capture", None)]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_batch_of_texts_drafts_from_long_matches_alone(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, together, and before what was said is committed."""
    if not is_compiled:
        monkeypatch.setattr(suffix, "is_compiled", lambda: False)
    reqs = [request(COPY, [3]), request([1, 2, 3], [4]), request([7, 3, 8], [3])]
    assert suffix_drafter().draft(decode_batch(reqs)).num_nodes == [5, 1, 5]
    made, ahead = suffix_drafter(min_match=3), suffix_drafter(min_match=3)
    proposal = made.draft(decode_batch(reqs))
    assert [nodes(proposal, place)[0] for place in range(3)] == [[3, 4, 5, 9, 1], [4], [3]]
    assert [len(made.draft_one(req).tokens) for req in reqs] == [5, 1, 1]
    before = [request(req.prompt_ids) for req in reqs]
    said = [req.output_ids for req in reqs]
    early = ahead.draft_ahead(before, said, [5] * 3)
    assert [nodes(early, place) for place in range(3)] == [nodes(proposal, i) for i in range(3)]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_which_texts_may_have_a_long_match_soon(
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


def test_declares_what_either_needs() -> None:
    made = hybrid(FakeNeural(probs=True), suffix_branches=2, num_draft_tokens=8)
    assert (made.needs_hidden, made.writes_kv, made.emits_probs) == (True, True, True)
    assert made.proposes_tree
    assert made.max_nodes == 8
    assert not hybrid(FakeNeural()).proposes_tree
    assert hybrid(FakeNeural(tree=True)).proposes_tree


def test_the_flag_puts_it_around_an_algorithm() -> None:
    spec = SpecConfig(
        algorithm="NGRAM", num_draft_tokens=8, hybrid_suffix=True, hybrid_suffix_min_match=5
    )
    made = make_drafter(DraftContext(spec, lambda req: 100))
    assert isinstance(made, HybridDrafter)
    assert made.suffix.min_match == 5


@pytest.mark.parametrize("algorithm", [None, "SUFFIX"])
def test_there_must_be_another_drafter(algorithm: str | None) -> None:
    spec = SpecConfig(algorithm=algorithm, num_draft_tokens=8, hybrid_suffix=True)
    with pytest.raises(ConfigError, match="--speculative-hybrid-suffix"):
        make_drafter(DraftContext(spec, lambda req: 100))
