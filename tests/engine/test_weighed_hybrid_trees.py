"""Trees of a model beside those of text under verifiers that weigh drafts, or relax them, in rounds
on the device: a seed says what it says in rounds of the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specengine.engine.graph_weighed_tree import GraphWeighedTreeRound
from specengine.kernels import accept_relaxed, sample_rows, tree_shape
from tests.engine.flying_world import come_and_go
from tests.engine.hybrid_tree_world import CASES, KINDS, NODES, trees
from tests.engine.hybrid_world import LONG
from tests.engine.test_graph_weighed import ON_CPU, check, fallbacks
from tests.engine.test_graph_weighed_tree import NEARLY_FULL, check_in_the_interpreter
from tests.engine.test_weighed_hybrid import compare
from tests.engine.test_weighed_wishes import check as check_wishes
from tests.engine.weighed_hybrid_world import (
    ALONE,
    RULES,
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

OF_TREES = [rule for rule in RULES if rule not in ("rejection", "block")]
FEW = [  # the others take long
    ("sibling", "EAGLE3", "both", True),
    ("sibling", "STANDALONE", "text", True),
    ("target_only", "STANDALONE", "model", False),
    ("relaxed best", "EAGLE3", "text", False),
]
EVERY = [
    pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
    for case in (
        (rule, *case, flag) for rule in OF_TREES for case in CASES for flag in (True, False)
    )
]


@ON_CPU
@pytest.mark.parametrize(("rule", "name", "kind", "overlaps"), EVERY)
def test_seeds_say_what_they_say_on_the_host(
    rule: str,
    name: str,
    kind: str,
    overlaps: bool,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where some have text, all have, and nobody has; deeper than the model drafts, and shorter."""
    folder, spec = folders[name]
    host, llm = pair_of(folder, trees(spec, kind, hybrid_suffix_min_match=2, **RULES[rule]))
    flying, sources = flying_of(llm, monkeypatch, overlaps)
    prompts = prompts_of(torn, folder)
    check(host, llm, WISHES["ends"], prompts)
    check(host, llm, [ALONE], prompts[:1])
    assert fallbacks(flying) <= {NEARLY_FULL}
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert 10 < totals.num_accepted_tokens < totals.num_draft_tokens - 10
    assert sources.rounds.keys() == {"model", "both", "text"}
    assert min(sources.accepted["model"], sources.accepted["text"]) > 0
    weighed = {form.num_steps for form in sources.forms if form.choosing.weighs}
    assert weighed == {3, NODES - 1}


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "kind", "wish"),
    [
        pytest.param(*case, wish, marks=() if wish == few else pytest.mark.slow)
        for *case, few in (
            ("sibling", "EAGLE3", "both", "grammars"),
            ("target_only", "STANDALONE", "text", "edits"),
            ("of the best", "EAGLE3", "text", "edits"),
            ("of the best", "EAGLE", "both", None),
            ("relaxed", "STANDALONE", "model", None),
            ("relaxed best", "EAGLE3", "text", "all"),
        )
        for wish in WISHES
        if wish != "ends"
    ],
)
def test_wishes_fly(
    rule: str,
    name: str,
    kind: str,
    wish: str,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Edits, logprobs and grammars: chains of a model follow edits as they do among chains."""
    folder, spec = folders[name]
    spec = trees(spec, kind, hybrid_suffix_min_match=1, **RULES[rule])
    host, llm = pair_of(folder, spec)
    flying, sources = flying_of(llm, monkeypatch)
    check_wishes(host, llm, shorter(WISHES[wish]), prompts_of(torn, folder))
    assert not fallbacks(flying)
    if wish != "logprobs":  # of too few requests
        assert sources.rounds.keys() >= {"both"}
        assert min(sources.accepted["model"], sources.accepted["text"]) > 0
    assert llm.engine.scheduler.spec_totals == host.engine.scheduler.spec_totals


@ON_CPU
@pytest.mark.parametrize("kind", ["both", "text"])
def test_the_rule_sees_the_trees_of_the_host(
    kind: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what they were drawn from: of text all on one token."""
    folder, spec = folders["EAGLE3"]
    host, llm = pair_of(folder, trees(spec, kind, hybrid_suffix_min_match=2, **RULES["sibling"]))
    _, sources = flying_of(llm, monkeypatch)
    its, mine = (seen_drafts(one, monkeypatch) for one in (host, llm))
    params = [replace(ALONE, seed=seed, max_tokens=40) for seed in range(51, 55)]
    check(host, llm, params, prompts_of(torn, folder, 4))
    assert sources.rounds["both"] > 2
    assert compare(its, mine, has_rows=True) > 20


@ON_CPU
@pytest.mark.parametrize("kind", ["both", pytest.param("text", marks=pytest.mark.slow)])
def test_greedy_requests_alone_are_matched(
    kind: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = folders["EAGLE3"]
    host, llm = pair_of(folder, trees(spec, kind, **RULES["sibling"]))
    flying, sources = flying_of(llm, monkeypatch)
    given = prompts_of(torn, folder, 3), [replace(LONG, max_tokens=30)] * 3
    found, expected = (one.generate(*given) for one in (llm, host))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert not any(form.choosing.weighs for form in flying.captured)
    assert not fallbacks(flying)
    assert sources.rounds.keys() >= {"model", "both"}


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "kind"),
    [
        ("sibling", "EAGLE3", "both"),
        pytest.param("target_only", "STANDALONE", "model", marks=pytest.mark.slow),
        pytest.param("of the best", "MTP layers", "text", marks=pytest.mark.slow),
        pytest.param("relaxed", "EAGLE3", "text", marks=pytest.mark.slow),
    ],
)
def test_requests_come_and_go_between_both_kinds_of_rounds(
    rule: str,
    name: str,
    kind: str,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever runs around it, a seed says what it says alone."""
    folder, spec = folders[name]
    host, llm = pair_of(folder, trees(spec, kind, **RULES[rule]))
    flying, sources = flying_of(llm, monkeypatch)
    wishes = [*WISHES["ends"], *shorter([*WISHES["all"], *WISHES["grammars"]])]
    come_and_go(host, llm, prompts_of(torn, folder), wishes, monkeypatch)
    assert flying.counters["replays"] > 20
    assert fallbacks(flying) <= {NEARLY_FULL}
    assert sources.rounds.keys() >= {"model", "both"}


@ON_CPU
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["sibling", "relaxed"])
def test_kernels_decide_what_the_reference_does(
    rule: str, kind: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    folder, spec = folders["EAGLE3"]
    host, llm = pair_of(folder, trees(spec, kind, hybrid_suffix_min_match=1, **RULES[rule]))
    flying, sources = flying_of(llm, monkeypatch)
    prompts, params = prompts_of(torn, folder, 2), [replace(ALONE, max_tokens=20)] * 2
    more = accept_relaxed, sample_rows, tree_shape
    check_in_the_interpreter(host, llm, prompts, params, monkeypatch, *more)
    assert not fallbacks(flying)
    assert sources.rounds["both"] + sources.rounds["text"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize(("name", "kind"), CASES)
    @pytest.mark.parametrize("rule", OF_TREES)
    def test_graphs_change_nothing(
        self, rule: str, name: str, kind: str, overlap: bool, folders: Folders, torn: Prompts
    ) -> None:
        folder, spec = folders[name]
        host, llm = pair_on_the_gpu(folder, trees(spec, kind, **RULES[rule]), overlap)
        prompts = prompts_of(torn, folder)
        for count in (6, 3, 1):
            check(host, llm, WISHES["ends"][:count], prompts[:count])
        check(host, llm, [ALONE], prompts[:1])
        for wish in ("edits", "logprobs", "grammars", "all"):
            check_wishes(host, llm, shorter(WISHES[wish]), prompts)
        flying, stats = llm.engine.graph_round, llm.engine.stats().graphs["round"]
        assert isinstance(flying, GraphWeighedTreeRound)
        assert {form.model_steps for form in flying.captured} == {None, 3, 0}
        assert stats.replays > 60
        assert stats.fallbacks.keys() <= {NEARLY_FULL}

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("rule", "name"), [("sibling", "EAGLE3"), ("relaxed", "STANDALONE")])
    def test_requests_come_and_go(
        self,
        rule: str,
        name: str,
        kind: str,
        folders: Folders,
        torn: Prompts,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        folder, spec = folders[name]
        host, llm = pair_on_the_gpu(folder, trees(spec, kind, **RULES[rule]), overlap=True)
        wishes = [*WISHES["ends"], *shorter([*WISHES["all"], *WISHES["grammars"]])]
        come_and_go(host, llm, prompts_of(torn, folder), wishes * 2, monkeypatch)
        assert llm.engine.flights is not None
        assert fallbacks(llm.engine.flights.graph_round) <= {NEARLY_FULL}
