"""Text is indexed while the device runs: drafts are the same, and have less to read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.ngram.drafter import NgramDrafter
from specengine.draft.suffix.drafter import SuffixDrafter
from specengine.engine.lookup_prefetch import IndexAhead
from specengine.engine.round.key import RoundKey, RoundPlan
from specengine.engine.round.lookup import LookupDraft
from tests.support.chosen_depths import ChosenDepths
from tests.support.device_rounds import run_on_device
from tests.support.draft_batches import request
from tests.support.rounds import ON_CPU
from tests.support.stepping import add, finish, step_until

PROMPTS = ["abcabcabcabcabc", "0123456789" * 4, "abab" * 4]
EVERY = 12  # rounds, drafts are tried for one
PARAMS = SamplingParams(max_tokens=56, temperature=0.0, ignore_eos=True)
SPECS = [
    SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=4),
    SpecConfig(algorithm="SUFFIX", num_draft_tokens=4),
    SpecConfig(algorithm="NGRAM", num_draft_tokens=4, hybrid_suffix=True),
    SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=6, ngram_branches=2),
    SpecConfig(algorithm="SUFFIX", num_draft_tokens=6, suffix_branches=2),
]
IDS = ["NGRAM", "SUFFIX", "hybrid", "NGRAM tree", "SUFFIX tree"]


@dataclass
class Reader:
    read: Counter[Req] = field(default_factory=Counter)

    def index_ahead(self, req: Req, most: int) -> None:
        assert most > 0
        self.read[req] += 1


@dataclass
class Late:
    """An event that has not passed the first so many times."""

    left: int

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("looks", [1, 3, 1000])
def test_requests_take_turns_at_being_indexed(looks: int) -> None:
    reader, reqs = Reader(), [request([1]) for _ in range(20)]
    index = IndexAhead(cast(Any, reader))
    for _ in range(60):
        index.advance(reqs, Late(looks))
    assert sum(reader.read.values()) == 60 * min(looks, 3)
    assert max(reader.read.values()) - min(reader.read[req] for req in reqs) <= 1


def test_late_host_indexes_nothing() -> None:
    reader = Reader()
    IndexAhead(cast(Any, reader)).advance([request([1])], Late(0))
    assert not reader.read


def test_request_is_indexed_while_others_come_and_go() -> None:
    reader, reqs, stays = Reader(), [request([1]) for _ in range(12)], request([1])
    index = IndexAhead(cast(Any, reader))
    for i in range(200):
        reqs = [*reqs[1 + i % 2 :], request([1]), *[request([1])] * (i % 2)]
        index.advance([*reqs[: i % 12], stays, *reqs[i % 12 :]], Late(9))
    assert reader.read[stays] > 10


@dataclass
class Watched:
    llm: LLM
    drafts: list[list[list[int]]] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)  # tokens not read yet when drafts were tried

    @property
    def drafters(self) -> list[NgramDrafter | SuffixDrafter]:
        outer: Any = self.llm.engine.drafter
        return [outer.inner, outer.suffix] if hasattr(outer, "suffix") else [outer]

    def watch(self, source: LookupDraft, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter, put = self.llm.engine.drafter, source.send
        given, given_ahead = drafter.draft, drafter.draft_ahead

        def draft(batch: Any) -> DraftProposal:
            for one in self.drafters:
                self.behind += [unread(one, req) for req in batch.reqs]
            return given(batch)

        def keep(proposal: DraftProposal, levels: list[int]) -> RoundPlan:
            rows = zip(proposal.tokens.tolist(), proposal.num_nodes, strict=True)
            self.drafts.append([row[:count] for row, count in rows])
            return put(proposal, levels)

        def draft_ahead(reqs: Any, emitted: Any, max_nodes: Any) -> DraftProposal:
            (one,) = self.drafters
            self.behind += [unread(one, r) + len(new) for r, new in zip(reqs, emitted, strict=True)]
            return given_ahead(reqs, emitted, max_nodes)

        monkeypatch.setattr(drafter, "draft_ahead", draft_ahead)
        monkeypatch.setattr(drafter, "draft", draft)
        monkeypatch.setattr(source, "send", keep)


def unread(drafter: NgramDrafter | SuffixDrafter, req: Req) -> int:
    return req.seq_len - drafter._texts[req].num_tokens


def steered(
    target: Path, spec: SpecConfig, is_late: bool, monkeypatch: pytest.MonkeyPatch, **flags: Any
) -> Watched:
    """Plain rounds, and now and then one that drafts."""
    given = {"dtype": "float32", "max_total_tokens": 2048, **flags}
    llm = LLM(str(target), spec, disable_cuda_graph=True, **given)
    rounds = run_on_device(llm)
    if is_late:  # the device is always behind, until it is waited for
        monkeypatch.setattr(rounds, "is_done", lambda in_flight: False)
    for size in rounds.batch_sizes:  # no round follows into a graph that is not there yet
        for steps in rounds.steps:
            rounds.graph(RoundKey(size, steps))
    assert llm.engine.pipeline is not None
    llm.engine.pipeline.depths.chooser = ChosenDepths(lambda number: 0 if number % EVERY else 3)
    watched = Watched(llm)
    assert isinstance(rounds.source, LookupDraft)
    watched.watch(rounds.source, monkeypatch)
    return watched


@ON_CPU
@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_drafts_are_the_same_and_have_less_to_read(
    spec: SpecConfig, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_late in (False, True):
        one = steered(target, spec, is_late, monkeypatch)
        outputs = [result.token_ids for result in one.llm.generate(PROMPTS, PARAMS)]
        found.append((outputs, one))
        assert not any(drafter._texts for drafter in one.drafters), "of requests that left"
    (plain, lazy), (outputs, eager) = found
    assert outputs == plain
    assert eager.drafts == lazy.drafts
    assert any(len(draft) > 1 for drafts in eager.drafts for draft in drafts)
    first = len(PROMPTS) * len(eager.drafters)  # drafts, which read the prompts
    assert max(lazy.behind[first:]) >= EVERY - 1
    assert max(eager.behind[first:]) <= len(PROMPTS) + 2, "a turn each, and what was emitted since"


@ON_CPU
def test_request_that_leaves_in_flight_has_no_text(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = steered(target, SPECS[0], True, monkeypatch)
    gone, stays = (
        add(one.llm, "gone", PROMPTS[0], PARAMS),
        add(one.llm, "stays", PROMPTS[1], PARAMS),
    )
    step_until(one.llm, lambda: gone.spec.num_rounds == 5)
    assert one.llm.engine.pipeline is not None
    assert one.llm.engine.pipeline.has_in_flight
    one.llm.engine.abort("gone")
    step_until(one.llm, lambda: stays.spec.num_rounds == 9)
    assert one.drafters[0]._texts.keys() == {stays}
    finish(one.llm)
    assert not one.drafters[0]._texts


@ON_CPU
def test_retraction_changes_no_token(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"{i}{i}{i}" for i in range(4)]
    expected = LLM(str(target), None, dtype="float32").generate(prompts, PARAMS)
    one = steered(target, SPECS[0], True, monkeypatch, max_total_tokens=208)
    one.llm.engine.scheduler.admission.demand.share = 0.0
    found = one.llm.generate(prompts, PARAMS)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert one.llm.engine.scheduler.num_retractions > 0
    assert not one.drafters[0]._texts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_indexing_ahead_changes_no_token_on_the_gpu(spec: SpecConfig, target: Path) -> None:
    given = {"dtype": "float32", "max_total_tokens": 2048}
    plain = LLM(str(target), None, disable_cuda_graph=True, **given)
    expected = [one.token_ids for one in plain.generate(PROMPTS, PARAMS)]
    llm = LLM(str(target), spec, **given)
    pipeline = llm.engine.pipeline
    assert pipeline is not None
    pipeline.depths.chooser = ChosenDepths(lambda number: 0 if number % EVERY else 3)
    assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == expected
    assert pipeline.executor.counters["replays"] > 2 * EVERY
    assert not any(drafter._texts for drafter in Watched(llm).drafters)
