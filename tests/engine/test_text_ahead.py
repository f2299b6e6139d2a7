"""Rounds of text are launched when the last has landed, and before it is committed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.engine.flying_world import let_fly
from tests.engine.test_flights import ScriptedDepths, ScriptedRound

from specengine import LLM, SamplingParams, SpecConfig, SpecControl
from specengine.core.grammar import GrammarSpec
from specengine.core.request import Req
from specengine.core.spec import DraftProposal
from specengine.draft.ngram.drafter import NgramDrafter
from specengine.draft.proposals import Draft, assemble
from specengine.draft.suffix.drafter import SuffixDrafter
from specengine.engine.flights import Flights
from specengine.engine.host_drafts import HostDrafts
from specengine.engine.text_ahead import TextAhead
from specengine.kernels.native import lookup, suffix
from specengine.scheduler.policy import SchedulePolicy
from tests.engine.test_depth_in_results import ON_CPU, PROMPTS, add
from tests.support.draft_batches import decode_batch

IN_C = pytest.mark.skipif(
    not (lookup.is_compiled() and suffix.is_compiled()), reason="no C compiler"
)
SPECS = {
    "NGRAM": SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=4, adaptive=False),
    "SUFFIX": SpecConfig(algorithm="SUFFIX", num_draft_tokens=4, adaptive=False),
}
SPECS["NGRAM tree"] = replace(SPECS["NGRAM"], ngram_branches=2, num_draft_tokens=6)
SPECS["SUFFIX tree"] = replace(SPECS["SUFFIX"], suffix_branches=2, num_draft_tokens=6)
POLICY = SchedulePolicy(context_len=64, max_running_requests=8, chunked_prefill_size=64)
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def request(output: int = 3, **sampling: Any) -> Req:
    req = Req("r", [1] * 5, replace(GREEDY, **sampling), frozenset([9]))
    req.output_ids = [1] * output
    return req


class Text:
    """An AheadDrafter that says how it was asked."""

    reads_text_alone = drafts_ahead = True
    max_nodes = 6

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], list[int]]] = []

    def study(self, req: Req, most: int) -> None: ...

    def release(self, req: Req) -> None: ...

    def draft_ahead(self, reqs: Any, said: Any, max_nodes: Any) -> DraftProposal:
        self.asked.append((said, max_nodes))
        counts = list(max_nodes)
        width = max(counts)
        parents = torch.arange(-1, width - 1).expand(len(counts), -1)
        tokens = torch.full((len(counts), width), 7)
        return DraftProposal(tokens, parents, counts, is_chain=True)


def ahead(drafter: Text, cuts: bool = False) -> TextAhead:
    scheduler = SimpleNamespace(policy=POLICY, follow=lambda reqs, slots: reqs)
    return TextAhead(cast(Any, drafter), cast(Any, scheduler), cuts)


@pytest.mark.parametrize(
    ("req", "said", "follows"),
    [
        (request(), [1, 2, 3], True),
        (request(max_tokens=6), [1, 2], True),
        (request(max_tokens=6), [1, 2, 3], False),
        (request(max_tokens=6), [1, 2, 3, 4], False),
        (request(output=56, max_tokens=None), [1, 2], True),
        (request(output=56, max_tokens=None), [1, 2, 3], False),
        (request(ignore_eos=False), [1, 9, 3], False),
        (request(ignore_eos=True), [1, 9, 3], True),
        (request(stop_token_ids=(3,)), [1, 9, 3], False),
        (request(stop_token_ids=(3,), min_tokens=9), [1, 9, 3], True),
        (request(stop=("a",)), [1, 2], True),
    ],
)
def test_who_goes_on_follows(req: Req, said: list[int], follows: bool) -> None:
    other = request()
    expected = [other, req] if follows else [other]
    assert ahead(Text()).follow([other, req], [[1], said], 8) == expected


def test_what_is_left() -> None:
    reqs = [request(count, max_tokens=limit) for count in (0, 3, 57) for limit in (None, 5, 60, 99)]
    said = [[1] * (place % 4) for place in range(len(reqs))]
    expected = [
        POLICY.remaining_tokens(req) - len(new) for req, new in zip(reqs, said, strict=True)
    ]
    assert POLICY.left_after(reqs, said) == expected


def test_drafts_are_as_deep_as_requests_allow() -> None:
    drafter = Text()
    one = ahead(drafter)
    shallow = request(speculative=SpecControl(num_steps=1))
    reqs = [request(), shallow, request(max_tokens=7), request(max_tokens=5)]
    said = [[1], [2], [3, 4], [5, 6]]
    going = one.follow(reqs, said, 8)
    assert going == reqs[:3]
    assert one.draft(going, 3).num_nodes == [4, 2, 2]
    assert one.draft(going, 7).num_nodes == [6, 2, 2]
    assert drafter.asked == [([[1], [2], [3, 4]], [4, 2, 2]), ([[1], [2], [3, 4]], [6, 2, 2])]


def test_drafts_that_are_weighed_are_those_of_the_host() -> None:
    """Which asks for all that is left, and cuts it."""
    drafter = Text()
    one = ahead(drafter, cuts=True)
    reqs = [request(), request(speculative=SpecControl(num_steps=1)), request(max_tokens=7)]
    said = [[1], [2], [3, 4]]
    assert one.follow(reqs, said, 8) == reqs
    assert one.draft(reqs, 3).num_nodes == [4, 2, 2]
    assert drafter.asked == [(said, [6, 6, 2])]


class TreesOfText(Text):
    proposes_tree = True

    def most_nodes(self, num_steps: int) -> int:
        return self.max_nodes

    def draft_ahead(self, reqs: Any, said: Any, max_nodes: Any) -> DraftProposal:
        """Two branches."""
        self.asked.append((said, max_nodes))
        parents = [-1, 0, 0, 1, 2, 3]
        drafts = [Draft([7] * count, parents[:count]) for count in max_nodes]
        return assemble(drafts)


def test_trees_are_cut_to_what_requests_allow() -> None:
    """When they are drafted: before, nobody knows which nodes are too deep."""
    drafter = TreesOfText()
    one = ahead(drafter)
    shallow = request(speculative=SpecControl(num_steps=1))
    reqs, said = [request(), shallow, request(max_tokens=8)], [[1], [2], [3, 4]]
    assert one.follow(reqs, said, 8) == reqs
    proposal = one.draft(reqs, 2)
    assert drafter.asked == [(said, [6, 6, 3])]
    assert proposal.num_nodes == [5, 3, 3]
    assert proposal.parents[0, :5].tolist() == [-1, 0, 0, 1, 2]


class Device(ScriptedRound):
    """One for drafts from the host."""

    def __init__(self) -> None:
        super().__init__(HostDrafts(4, 3, torch.device("cpu")))

    def has_landed(self, flight: Any) -> bool:
        return True


def flights_of(device: ScriptedRound, plan: list[int], overlaps: bool = True) -> Flights:
    scheduler = SimpleNamespace(policy=POLICY, follow=lambda reqs, slots: reqs)
    given = cast(Any, device), cast(Any, Text()), cast(Any, scheduler)
    return Flights(*given, cast(Any, ScriptedDepths(plan)), overlaps)


def fly(device: ScriptedRound, plan: list[int], rounds: int) -> Any:
    """The first of them without drafts, and unseen."""
    flights = flights_of(device, plan)
    flights.launch(cast(Any, SimpleNamespace(reqs=[request(), request()], batch_size=2)))
    for _ in range(rounds):
        flights.land()
    return flights.depths


def test_who_drafts_follows_what_has_landed() -> None:
    device = Device()
    depths = fly(device, [0, 3, 3, 0, 0, 3], 5)
    assert device.diary == [
        *("launch 1: 0", "land 1", "follow 2: 3", "land 2", "follow 3: 3"),
        *("land 3", "follow 4: 0", "follow 5: 0", "land 4", "land 5", "follow 6: 3"),
    ]
    assert depths.seen == [(2, 0), (2, 3), (2, 3), (2, 0), (2, 0)]
    assert depths.timed == [False, True, True, False, True], "not what flew beside nothing"
    assert [one > 0 for one in depths.drafting] == [False, True, True, False, False]


def test_the_next_is_launched_before_anything_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What that takes, the device would wait for."""
    device = Device()
    flights, launched = flights_of(device, [0, 3, 3]), list[int]()
    monkeypatch.setattr(flights.depths, "observe", lambda *_, **__: launched.append(device.count))
    flights.launch(cast(Any, SimpleNamespace(reqs=[request()], batch_size=1)))
    for _ in range(2):
        flights.land()
    assert launched == [2, 3]


def test_nobody_follows_without_overlap() -> None:
    device = Device()
    flights = flights_of(device, [0, 3], overlaps=False)
    flights.launch(cast(Any, SimpleNamespace(reqs=[request()], batch_size=1)))
    flights.land()
    assert device.diary == ["launch 1: 0", "land 1"]


def test_a_choice_without_a_graph_is_kept_for_the_next_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    monkeypatch.setattr(device, "follow", lambda *_: None)
    flights = flights_of(device, [0, 3])
    flights.launch(cast(Any, SimpleNamespace(reqs=[request()], batch_size=1)))
    flights.land()
    assert not flights.in_the_air
    assert flights._choose([request()]).num_steps == 3


@pytest.mark.parametrize("weighs", [True, False])
def test_which_flights_cut(weighs: bool) -> None:
    device = Device()
    device.choices.weighs = weighs
    flights = flights_of(device, [0, 3])
    text = cast(Any, flights.drafter)
    text.max_nodes = 4
    shallow = request(speculative=SpecControl(num_steps=1))
    flights.launch(cast(Any, SimpleNamespace(reqs=[shallow], batch_size=1)))
    flights.land()
    assert text.asked[0][1] == [4 if weighs else 2]


@IN_C
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("name", SPECS)
def test_drafts_ahead_are_those_after_the_commit(
    name: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 1, 2, 3] * 4
    kind: Any = NgramDrafter if SPECS[name].algorithm == "NGRAM" else SuffixDrafter
    for module in (lookup, suffix):
        if not is_compiled:
            monkeypatch.setattr(module, "is_compiled", lambda: False)
    drafters, shapes = [kind(SPECS[name], lambda req: 4) for _ in range(2)], set()
    assert drafters[0].drafts_ahead
    reqs = [[Req("r", text[:start], GREEDY) for start in (3, 9, 20)] for _ in range(2)]
    for place in range(20, 50, 3):
        said = [text[place : place + 3]] * 3
        first = drafters[0].draft_ahead(reqs[0], said, [4, 4, 4])
        for req, new in zip([*reqs[0], *reqs[1]], [*said, *said], strict=True):
            req.output_ids += new
        then = drafters[1].draft(decode_batch(reqs[1]))
        assert first.tokens.tolist() == then.tokens.tolist()
        assert first.parents.tolist() == then.parents.tolist()
        assert first.num_nodes == then.num_nodes
        shapes.add(first.is_chain)
    assert (False in shapes) == drafters[0].proposes_tree


@pytest.mark.parametrize("name", SPECS)
def test_nobody_drafts_ahead_from_what_others_are_about_to_say(name: str) -> None:
    flag = f"{str(SPECS[name].algorithm).lower()}_shared_corpus"
    kind: Any = NgramDrafter if SPECS[name].algorithm == "NGRAM" else SuffixDrafter
    assert not kind(replace(SPECS[name], **{flag: True}), lambda req: 4).drafts_ahead


@ON_CPU
@IN_C
@pytest.mark.parametrize("grammar", [None, GrammarSpec.regex("(ab|01){8}")], ids=["free", "ruled"])
@pytest.mark.parametrize("name", SPECS)
def test_outputs_and_rounds_are_the_same(
    name: str, grammar: GrammarSpec | None, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [replace(GREEDY, max_tokens=count) for count in (60, 31, 12)]
    params[1] = replace(params[1], grammar=grammar, ignore_eos=grammar is None)
    found, asked = [], []
    for overlaps in (False, True):
        llm = LLM(str(target), SPECS[name], dtype="float32", max_total_tokens=2048)
        drafter: Any = llm.engine.drafter
        draft_ahead = drafter.draft_ahead

        def watched(*given: Any, draft_ahead: Any = draft_ahead) -> DraftProposal:
            asked.append(len(given[0]))
            return cast(DraftProposal, draft_ahead(*given))

        monkeypatch.setattr(drafter, "draft_ahead", watched)
        let_fly(llm, monkeypatch, overlaps)
        assert bool(asked) is False
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(3)]
        results = llm.generate(prompts, params)
        found.append([(one.token_ids, one.spec.histogram) for one in results])
        llm.engine.scheduler.check_invariant()
        assert bool(asked) is overlaps
    assert found[0] == found[1]
    assert set(asked) == {1, 2, 3}


@ON_CPU
@IN_C
@pytest.mark.parametrize("name", SPECS)
def test_texts_are_read_again_after_an_interruption(
    name: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round that had landed was not committed, and is flown again."""
    llm = LLM(str(target), SPECS[name], dtype="float32", max_total_tokens=2048)
    (plain,) = llm.generate(PROMPTS[:1], GREEDY)
    flying = let_fly(llm, monkeypatch)
    fly, flown, interrupted = flying._fly, [], 0

    def breaks(*given: Any) -> Any:
        flown.append(fly(*given))
        if len(flown) in (4, 9):
            raise KeyboardInterrupt
        return flown[-1]

    monkeypatch.setattr(flying, "_fly", breaks)
    req, drafter = add(llm, "it", PROMPTS[0], GREEDY), cast(Any, llm.engine.drafter)
    while llm.engine.has_work:
        try:
            llm.engine.step()
        except KeyboardInterrupt:
            interrupted += 1
        if req in drafter._texts and not llm.engine.flights.in_the_air:  # type: ignore[union-attr]
            assert drafter._texts[req].num_tokens <= req.seq_len
    assert interrupted == 2
    assert req.output_ids == plain.token_ids
