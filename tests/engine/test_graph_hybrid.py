"""A model's chains beside suffix matches in rounds on the device: tokens are plain decoding's, and
what is drafted and accepted is what it is in rounds of the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine import GrammarSpec, SpecConfig, SpecControl
from specengine.draft.hybrid import HybridDrafter
from specengine.engine.adaptive.choice import Decision
from specengine.engine.adaptive.cost_table import StepCosts
from specengine.engine.adaptive.running_costs import RunningCosts
from specengine.engine.adaptive.steps import AdaptiveSteps
from specengine.engine.flights import Flights
from specengine.engine.ragged_build import _kinds_of_rounds
from specengine.engine.round_form import Flight, Wish
from specengine.engine.row_choices import BEST
from specengine.kernels.native import suffix
from tests.engine.flying_world import come_and_go
from tests.engine.hybrid_world import (
    LONG,
    NAMES,
    PASSAGE,
    PROMPTS,
    fly,
    hybrid,
    kind_of,
    make,
)
from tests.support.plain import plain_says
from tests.engine.test_graph_round import EDITED, SAMPLED
from tests.engine.test_graph_weighed import ON_CPU, check, fallbacks
from tests.halves import slow_but

Folders = dict[str, tuple[Path, SpecConfig]]

SURE = replace(LONG, temperature=0.15, top_k=3, seed=21)
PARAMS = {
    "greedy": [LONG] * 4,
    "sampled": [SURE, replace(SAMPLED[0], max_tokens=50), LONG, replace(SURE, seed=22)],
    "limited": [
        replace(LONG, speculative=SpecControl(num_steps=1)),
        replace(SURE, max_tokens=31),
        replace(LONG, speculative=SpecControl(enabled=False)),
        replace(LONG, max_tokens=43, speculative=SpecControl(num_steps=5)),
    ],
}
FAST = [(name, 8, "greedy") for name in NAMES]
FAST += [(name, 8, ("sampled", "limited")[n % 2]) for n, name in enumerate(NAMES)]
RULED = GrammarSpec.regex("[a-c ]{30}(to be or not ){4}")
WISHES = {
    "edits": [
        replace(LONG, frequency_penalty=-0.8, logit_bias={5: 2.0, 9: -3.0}),
        replace(SURE, presence_penalty=0.4, min_tokens=9, stop_token_ids=(7,)),
        replace(EDITED[1], max_tokens=40),
        replace(LONG, repetition_penalty=0.9),
    ],
    "logprobs": [replace(LONG, logprobs=2), replace(SURE, logprobs=0), LONG, SURE],
    "grammars": [replace(LONG, grammar=RULED), replace(SURE, grammar=RULED), SURE, LONG],
}


@ON_CPU
@pytest.mark.parametrize(
    ("name", "most_nodes", "params"), slow_but(FAST, product(NAMES, (4, 8), PARAMS))
)
def test_tokens_and_rounds_are_those_of_the_host(
    name: str, most_nodes: int, params: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """most_nodes: as deep as the model drafts, and deeper."""
    folder, spec = folders[name]
    host, llm = (make(folder, hybrid(spec, most_nodes)) for _ in range(2))
    flying, sources = fly(llm, monkeypatch)
    for count in (4, 1, 2):  # with captures, and on prefix hits
        prompts, wishes = PROMPTS[:count], PARAMS[params][:count]
        found = check(host, llm, wishes, prompts)
        plain = plain_says(folder, prompts, wishes, disable_cuda_graph=True)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert not fallbacks(flying)
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    if params == "greedy":
        assert sources.rounds.keys() == {"model", "both", "text"}
        assert min(sources.accepted["model"], sources.accepted["text"]) > 20
        assert {form.num_steps for form in sources.forms} == {3, most_nodes - 1}


@ON_CPU
@pytest.mark.parametrize("corpus", [False, True], ids=["alone", "shared corpus"])
def test_rounds_are_the_same_without_overlap(
    corpus: bool, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = folders["EAGLE3"]
    given = {"suffix_shared_corpus": corpus, "suffix_corpus_tokens": 500}
    spec = hybrid(spec, **given if corpus else {})
    host, llm = make(folder, spec), make(folder, spec)
    flying, sources = fly(llm, monkeypatch, overlaps=corpus)
    assert llm.engine.flights is not None
    assert llm.engine.flights._ahead is None
    for count in (1, 3):
        check(host, llm, [LONG] * count, PROMPTS[:count])
    assert not fallbacks(flying)
    assert sources.rounds["text"] > 1


@ON_CPU
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
def test_wishes_fly(
    name: str, wish: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = folders[name]
    llm = make(folder, hybrid(spec))
    flying, sources = fly(llm, monkeypatch)
    found = llm.generate(PROMPTS, WISHES[wish])
    expected = plain_says(folder, PROMPTS, WISHES[wish], disable_cuda_graph=True)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert not fallbacks(flying)
    assert min(sources.accepted["model"], sources.accepted["text"]) > 5


@ON_CPU
@pytest.mark.parametrize(
    ("name", "min_match"), [("EAGLE3", 3), ("EAGLE3", 8), ("STANDALONE", 7), ("MTP layers", 3)]
)
def test_requests_come_and_go_between_both_kinds_of_rounds(
    name: str, min_match: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """min_match: with long ones, some rounds of the model follow unseen."""
    folder, spec = folders[name]
    spec, host = hybrid(spec, hybrid_suffix_min_match=min_match), make(folder, None)
    llm = make(folder, spec, max_running_requests=4)
    flying, sources = fly(llm, monkeypatch)
    every = [*PARAMS["greedy"], *PARAMS["sampled"], *PARAMS["limited"], *WISHES["grammars"]]
    come_and_go(host, llm, PROMPTS, every, monkeypatch)
    assert flying.counters["replays"] > 40
    assert not fallbacks(flying)
    assert sources.rounds.keys() >= {"model", "both"}


@ON_CPU
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
def test_the_model_drafts_unseen_where_no_match_can_be_long_enough(
    name: str, is_compiled: bool, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that have not landed may say four tokens each; what is drafted is what it would be."""
    if not is_compiled:
        monkeypatch.setattr(suffix, "is_compiled", lambda: False)
    folder, spec = folders[name]
    spec = hybrid(spec, hybrid_suffix_min_match=9)
    host, llm = make(folder, spec), make(folder, spec)
    flying, sources = fly(llm, monkeypatch)
    flights, drafter = llm.engine.flights, llm.engine.drafter
    assert flights is not None
    assert isinstance(drafter, HybridDrafter)
    follow, unseen = flights._follow, Counter[int]()

    def watched(flight: Flight) -> Flight | None:
        following = follow(flight)
        if following is not None and following.form.num_steps:
            assert all(drafter.suffix.match_length(req) < 5 for req in following.reqs)
            assert flights._drafting == 0.0
            unseen[len(following.reqs)] += 1
        return following

    monkeypatch.setattr(flights, "_follow", watched)
    for count in (4, 1, 2):
        check(host, llm, [replace(LONG, max_tokens=90)] * count, [*PROMPTS[1:], "y"][:count])
    assert not fallbacks(flying)
    assert unseen.keys() >= {1, 2}
    assert sources.accepted["text"] > 20
    assert not drafter.suffix._texts, "of those that have ended"


@ON_CPU
@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
def test_who_is_asked(name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model drafts where somebody has no text, as deep as it can; nothing is sent where nobody
    has any."""
    folder, spec = folders[name]
    llm = make(folder, hybrid(spec))
    flying, sources = fly(llm, monkeypatch)
    drafts, asked, sends = flying.drafter, list[int](), list[list[int]]()
    draft_rows, send = drafts.inner.draft_rows, drafts._send

    def watched(rows: Any, num_steps: int, picks: Any = None) -> Tensor:
        asked.append(num_steps)
        return draft_rows(rows, num_steps, picks)

    def sending(proposal: Any) -> Wish:
        sends.append(proposal.num_drafted)
        return send(proposal)

    monkeypatch.setattr(drafts.inner, "draft_rows", watched)
    monkeypatch.setattr(drafts, "_send", sending)
    llm.generate(PROMPTS, [LONG] * 4)
    llm.generate(PROMPTS[0], LONG)
    captured = sum(form.model_steps != 0 for form in flying.captured)
    assert set(asked) == {3}
    assert len(asked) == captured + sources.rounds["model"] + sources.rounds["both"]
    of_text = sources.rounds["text"] + sources.rounds["both"]
    assert of_text <= len(sends) <= of_text + len(flying.captured), "again where one is captured"
    assert all(map(any, sends))
    assert sources.rounds["text"] > 1


@ON_CPU
def test_depths_that_change_do_not_change_tokens(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is drafted is no deeper than was chosen: what is learned is told of that depth, and
    of whom each draft was."""
    folder, spec = folders["EAGLE3"]
    plain, llm = make(folder, None), make(folder, hybrid(spec))
    flying, sources = fly(llm, monkeypatch)
    flying.steps, chosen = [0, 1, 2, 3, 7], [7, 7, 2, 0, 3, 1, 0, 0, 7]
    costs = RunningCosts(StepCosts({1: {0: 1.0, 7: 1.5}}))
    depths = AdaptiveSteps(flying.steps, costs, model_steps=3)
    landed, kinds = list[tuple[int, int]](), set[tuple[int, str]]()
    decisions = cycle([Decision(depth, "it is told so", None) for depth in chosen])
    monkeypatch.setattr(depths, "_decide", lambda *_: next(decisions))
    observe = depths.observe

    def observed(size: int, num_steps: int, drafted: Any, *more: Any, **others: Any) -> None:
        limits, of_text = others["limits"], others["of_text"] or [False] * size
        assert max(limits) <= num_steps
        assert all(mark or limit <= 3 for mark, limit in zip(of_text, limits, strict=True))
        landed.append((num_steps, max(limits)))
        if num_steps:
            kind = "text" if all(of_text) else "both" if any(of_text) else "model"
            kinds.add((num_steps, kind))
        observe(size, num_steps, drafted, *more, **others)

    monkeypatch.setattr(depths, "observe", observed)
    parts = llm.engine.parts
    llm.engine.flights = Flights(flying, parts.drafter, parts.scheduler, depths, overlaps=True)
    for count in (3, 1):
        found, expected = (one.generate(PROMPTS[:count], [LONG] * count) for one in (llm, plain))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    some = {(depth, kind) for depth in (2, 3, 7) for kind in ("model", "both")}
    assert kinds >= some | {(7, "text")}
    deeper = [one for one in sources.forms if kind_of(one) == "both" and one.num_steps in (1, 2)]
    assert all(one.model_steps == one.num_steps for one in deeper)
    assert deeper
    assert {depth for depth, drafted in landed if drafted} == {1, 2, 3, 7}
    assert {form.num_steps for form in sources.forms} == {0, 1, 2, 3, 7}
    assert not fallbacks(flying)


@ON_CPU
@pytest.mark.parametrize("most_nodes", [4, 8])
def test_what_start_and_idle_moments_capture_is_all_that_rounds_need(
    most_nodes: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever depth is chosen, whoever has text, and whether anybody samples."""
    folder, spec = folders["EAGLE3"]
    llm = make(folder, hybrid(spec, most_nodes))
    flying, sources = fly(llm, monkeypatch)
    flying.steps = sorted({0, 1, 2, 3, most_nodes - 1})
    flying.capture()
    decisions = cycle([Decision(depth, "it is told so", None) for depth in (*flying.steps, 3, 2)])
    depths, parts = AdaptiveSteps(flying.steps), llm.engine.parts
    monkeypatch.setattr(depths, "_decide", lambda *_: next(decisions))
    llm.engine.flights = Flights(flying, parts.drafter, parts.scheduler, depths, overlaps=True)
    while llm.engine.use_idle_moment():
        pass
    captures = flying.counters["captures"]
    kinds = flying.forms(1, BEST)
    assert captures == len(flying.captured) == 2 * len(kinds) * 3
    chosen = replace(hybrid(spec, most_nodes), adaptive=True)
    assert len(kinds) <= _kinds_of_rounds(chosen), "memory is kept for these"
    for count in (4, 2, 1):
        for params in ([LONG] * count, [SURE] * count):
            llm.generate(PROMPTS[:count], params)
    assert flying.counters["captures"] == captures
    assert sources.rounds.keys() == {"model", "both", "text"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("most_nodes", [4, 8])
    @pytest.mark.parametrize("name", NAMES)
    def test_graphs_change_nothing(
        self, name: str, most_nodes: int, overlap: bool, folders: Folders
    ) -> None:
        folder, spec = folders[name]
        spec, more = hybrid(spec, most_nodes), {"disable_overlap_schedule": not overlap}
        host = make(folder, spec, disable_radix_cache=True)
        flying = {"disable_cuda_graph": False, "cuda_graph_bs": (1, 2, 4)}
        llm = make(folder, spec, disable_radix_cache=True, **flying, **more)
        for params in PARAMS.values():
            for count in (4, 1, 2):
                check(host, llm, params[:count], PROMPTS[:count])
        plain = make(folder, None)
        for params in WISHES.values():
            found, expected = (one.generate(PROMPTS, params) for one in (llm, plain))
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert llm.engine.flights is not None
        assert not fallbacks(llm.engine.flights.graph_round)
        assert llm.engine.stats().graphs["round"].replays > 60

    @pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
    def test_requests_come_and_go(
        self, name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, spec = folders[name]
        spec, host = hybrid(spec, adaptive=True), make(folder, None)
        flying = {"disable_cuda_graph": False, "cuda_graph_bs": (1, 2, 4)}
        llm = make(folder, spec, max_running_requests=4, **flying)
        every = [one for params in PARAMS.values() for one in params] + WISHES["grammars"]
        come_and_go(host, llm, [*PROMPTS, PASSAGE], every * 2, monkeypatch)
        assert llm.engine.flights is not None
        assert not fallbacks(llm.engine.flights.graph_round)
