"""A model's chains beside suffix matches under verifiers that weigh drafts, or relax them, in
rounds on the device: a seed says what it says in rounds of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specengine.engine.graph_weighed import GraphWeighedRound
from specengine.engine.round_form import Flight
from specengine.kernels import (
    accept_block,
    accept_chain,
    accept_rejection,
    accept_relaxed,
    sample_rows,
    weigh_rows,
)
from tests.engine.flying_world import come_and_go
from tests.engine.hybrid_world import LONG, PROMPTS, hybrid
from tests.engine.test_graph_mtp import SEEN_TOO_LITTLE
from tests.engine.test_graph_weighed import ON_CPU, check, fallbacks, said
from tests.engine.test_weighed_wishes import check as check_wishes
from tests.engine.weighed_hybrid_world import (
    ALONE,
    RULES,
    TORN,
    WISHES,
    Folders,
    Prompts,
    flying_of,
    pair_of,
    pair_on_the_gpu,
    prompts_of,
    seen_drafts,
    shorter,
)

NAMES = ["EAGLE", "EAGLE3", "MTP", "MTP layers", "STANDALONE"]
FEW = [  # the others take long
    ("rejection", "STANDALONE", True),
    ("block", "EAGLE3", True),
    ("target_only", "MTP layers", False),
    ("of the best", "EAGLE3", True),
    ("relaxed", "EAGLE3", False),
]
SOME = [("block", "all"), ("of the best", "grammars"), ("relaxed", "edits")]
CASES = [
    pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
    for case in ((rule, name, flag) for rule in RULES for name in NAMES for flag in (True, False))
]


@ON_CPU
@pytest.mark.parametrize(("rule", "name", "overlaps"), CASES)
def test_seeds_say_what_they_say_on_the_host(
    rule: str,
    name: str,
    overlaps: bool,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where some have text, all have, and nobody has; deeper than the model drafts, and shorter."""
    folder, spec = folders[name]
    host, llm = pair_of(folder, hybrid(spec, hybrid_suffix_min_match=2, **RULES[rule]))
    flying, sources = flying_of(llm, monkeypatch, overlaps)
    prompts = prompts_of(torn, folder)
    check(host, llm, WISHES["ends"], prompts)
    check(host, llm, [ALONE], prompts[:1])
    assert not fallbacks(flying)
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert 10 < totals.num_accepted_tokens < totals.num_draft_tokens - 10
    assert sources.rounds.keys() == {"model", "both", "text"}
    assert min(sources.accepted["model"], sources.accepted["text"]) > 0
    assert {form.num_steps for form in sources.forms if form.choosing.weighs} == {3, 7}


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "wish"),
    [
        pytest.param(rule, name, wish, marks=() if (rule, wish) in SOME else pytest.mark.slow)
        for rule, name in (
            ("block", "EAGLE3"),
            ("target_only", "STANDALONE"),
            ("of the best", "EAGLE3"),
            ("relaxed", "EAGLE3"),
        )
        for wish in WISHES
        if wish != "ends"
    ],
)
def test_wishes_fly(
    rule: str,
    name: str,
    wish: str,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Edits, logprobs and grammars."""
    folder, spec = folders[name]
    host, llm = pair_of(folder, hybrid(spec, hybrid_suffix_min_match=1, **RULES[rule]))
    flying, sources = flying_of(llm, monkeypatch)
    check_wishes(host, llm, shorter(WISHES[wish]), prompts_of(torn, folder))
    assert not fallbacks(flying)
    assert sources.rounds.keys() >= {"both"}
    if wish != "logprobs":  # of few requests
        assert min(sources.accepted["model"], sources.accepted["text"]) > 0
    assert llm.engine.scheduler.spec_totals == host.engine.scheduler.spec_totals


@ON_CPU
@pytest.mark.parametrize("rule", ["block", pytest.param("target_only", marks=pytest.mark.slow)])
def test_the_rule_sees_the_drafts_of_the_host(
    rule: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they were drawn from: of text all on one token."""
    folder, spec = folders["EAGLE3"]
    host, llm = pair_of(folder, hybrid(spec, hybrid_suffix_min_match=2, **RULES[rule]))
    _, sources = flying_of(llm, monkeypatch)
    its, mine = (seen_drafts(one, monkeypatch) for one in (host, llm))
    check(host, llm, WISHES["ends"], prompts_of(torn, folder))
    assert sources.rounds["both"] > 5
    certain = compare(its, mine, has_rows=rule == "block")
    assert rule != "block" or certain > 30


def compare(its: dict[Any, Any], mine: dict[Any, Any], has_rows: bool) -> int:
    """Of rounds with drafts -> rows of weights that lie on one token."""
    its, certain = {key: one for key, one in its.items() if len(one[0][0]) > 1}, 0
    assert len(its) > 30
    for key, (nodes, rows_NV) in its.items():
        found, found_NV = mine[key]
        assert found == nodes
        if has_rows:
            torch.testing.assert_close(found_NV, rows_NV, rtol=1e-4, atol=1e-5)
            certain += int((rows_NV.max(-1).values == 1).sum())
    return certain


@ON_CPU
@pytest.mark.parametrize("rule", ["block", pytest.param("of the best", marks=pytest.mark.slow)])
def test_greedy_requests_alone_are_matched(
    rule: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = folders["EAGLE3"]
    host, llm = pair_of(folder, hybrid(spec, **RULES[rule]))
    flying, sources = flying_of(llm, monkeypatch)
    check(host, llm, [replace(LONG, max_tokens=30)] * 3, prompts_of(torn, folder, 3))
    assert not any(form.choosing.weighs for form in flying.captured)
    assert not fallbacks(flying)
    assert sources.rounds.keys() >= {"model", "both"}


@ON_CPU
@pytest.mark.parametrize("min_match", [3, 9])
def test_of_text_the_host_tells_where_there_is_some(
    min_match: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where there can be none, the next round follows unseen."""
    folder, spec = folders["EAGLE3"]
    spec = hybrid(spec, hybrid_suffix_min_match=min_match, **RULES["block"])
    host, llm = pair_of(folder, spec)
    flying, sources = flying_of(llm, monkeypatch)
    assert isinstance(flying, GraphWeighedRound)
    flights, told, unseen = llm.engine.flights, list[list[int]](), list[Flight]()
    assert flights is not None
    tell, follow = flying._tell, flights._follow

    def telling(counts_B: Any, counts: list[int]) -> None:
        told.append(counts)
        tell(counts_B, counts)

    def watched(flight: Flight) -> Flight | None:
        following = follow(flight)
        unseen.extend([] if following is None else [following])
        return following

    monkeypatch.setattr(flying, "_tell", telling)
    monkeypatch.setattr(flights, "_follow", watched)
    check(host, llm, [LONG, LONG, replace(TORN, max_tokens=60)], [*PROMPTS[:2], "y"])
    with_text = sources.rounds["both"] + sources.rounds["text"]
    assert 0 < with_text <= len(told) < flying.counters["replays"] - 5
    assert (len(unseen) > 5) == (min_match == 9)
    assert not fallbacks(flying)


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("block", "EAGLE3"),
        pytest.param("rejection", "STANDALONE", marks=pytest.mark.slow),
        pytest.param("target_only", "MTP layers", marks=pytest.mark.slow),
        pytest.param("of the best", "EAGLE", marks=pytest.mark.slow),
        pytest.param("relaxed", "EAGLE3", marks=pytest.mark.slow),
    ],
)
def test_requests_come_and_go_between_both_kinds_of_rounds(
    rule: str, name: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever runs around it, a seed says what it says alone: nothing of how drafts of text are
    judged follows from whether a model drafts for somebody else."""
    folder, spec = folders[name]
    host, llm = pair_of(folder, hybrid(spec, **RULES[rule]))
    flying, sources = flying_of(llm, monkeypatch)
    wishes = [*WISHES["ends"], *shorter([*WISHES["all"], *WISHES["grammars"]])]
    come_and_go(host, llm, prompts_of(torn, folder), wishes, monkeypatch)
    assert flying.counters["replays"] > 20
    assert not fallbacks(flying)
    assert sources.rounds.keys() >= {"model", "both"}


@ON_CPU
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block", "relaxed"])
def test_kernels_decide_what_the_reference_does(
    rule: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    folder, spec = folders["EAGLE3"]
    host, llm = pair_of(folder, hybrid(spec, hybrid_suffix_min_match=1, **RULES[rule]))
    flying, sources = flying_of(llm, monkeypatch)
    prompts, params = prompts_of(torn, folder, 2), [replace(ALONE, max_tokens=20)] * 2
    expected = [*said(host.generate(prompts, params))]
    rules = accept_block, accept_rejection, accept_relaxed
    for module in (weigh_rows, sample_rows, accept_chain, *rules):
        monkeypatch.setattr(module, "use_triton", lambda backend, x: True)
    assert [*said(llm.generate(prompts, params))] == expected
    assert not fallbacks(flying)
    assert sources.rounds["both"] + sources.rounds["text"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("rule", RULES)
    def test_graphs_change_nothing(
        self, rule: str, name: str, overlap: bool, folders: Folders, torn: Prompts
    ) -> None:
        folder, spec = folders[name]
        host, llm = pair_on_the_gpu(folder, hybrid(spec, **RULES[rule]), overlap)
        prompts = prompts_of(torn, folder)
        for count in (6, 3, 1):
            check(host, llm, WISHES["ends"][:count], prompts[:count])
        check(host, llm, [ALONE], prompts[:1])
        for wish in ("edits", "logprobs", "grammars", "all"):
            check_wishes(host, llm, shorter(WISHES[wish]), prompts)
        flying, stats = llm.engine.graph_round, llm.engine.stats().graphs["round"]
        assert isinstance(flying, GraphWeighedRound)
        assert {form.model_steps for form in flying.captured} == {None, 3, 0}
        assert stats.replays > 60
        assert stats.fallbacks.keys() <= {SEEN_TOO_LITTLE}

    @pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
    @pytest.mark.parametrize("rule", ["block", "relaxed"])
    def test_requests_come_and_go(
        self,
        rule: str,
        name: str,
        folders: Folders,
        torn: Prompts,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        folder, spec = folders[name]
        host, llm = pair_on_the_gpu(folder, hybrid(spec, **RULES[rule]), overlap=True)
        wishes = [*WISHES["ends"], *shorter([*WISHES["all"], *WISHES["grammars"]])]
        come_and_go(host, llm, prompts_of(torn, folder), wishes * 2, monkeypatch)
        assert llm.engine.flights is not None
        assert not fallbacks(llm.engine.flights.graph_round)
