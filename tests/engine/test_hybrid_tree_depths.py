"""Rounds of a model's trees beside a text's, as deep as is chosen, and at the context's end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import cycle

import pytest

from specengine.engine.adaptive.acceptance import HybridAcceptance, RoundObservation
from specengine.engine.adaptive.choose import Decision
from specengine.engine.adaptive.state import AdaptiveSteps
from specengine.engine.flights import Flights
from specengine.engine.ragged_build import _kinds_of_rounds
from specengine.engine.row_choices import BEST
from tests.engine.hybrid_tree_world import NODES, SURE, Folders, Prompts, check, flying_of, trees
from tests.engine.hybrid_world import LONG, make
from tests.engine.test_graph_weighed import ON_CPU, fallbacks


@ON_CPU
@pytest.mark.parametrize("kind", ["model", "text"])
def test_what_start_and_idle_moments_capture_is_all_that_rounds_need(
    kind: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever depth is chosen, whoever has text, and whether anybody samples; and depths that
    change change no token."""
    folder, spec = folders["EAGLE3"]
    llm = make(folder, trees(spec, kind))
    flying, sources = flying_of(llm, monkeypatch)
    flying.steps = [0, 1, 2, 3, NODES - 1]
    flying.capture()
    decisions = cycle([Decision(depth, "it is told so", None) for depth in (*flying.steps, 3, 2)])
    parts = llm.engine.parts
    depths = AdaptiveSteps(flying.steps, model_steps=3, pads=True)
    monkeypatch.setattr(depths, "choose", lambda *_: next(decisions))
    seen, observe = list[RoundObservation](), depths.observe

    def observed(one: RoundObservation) -> None:
        assert one.limits is not None
        assert max(one.limits) <= one.num_steps
        from_lookup = one.from_lookup or [False] * one.batch_size
        own = [n for n, mark in zip(one.num_drafted, from_lookup, strict=True) if not mark]
        most = flying.drafter.own_nodes(one.num_steps)
        assert max(own, default=0) < most or not one.num_steps
        seen.append(one)
        observe(one)

    monkeypatch.setattr(depths, "observe", observed)
    llm.engine.flights = Flights(flying, parts.drafter, parts.scheduler, depths, overlaps=True)
    while llm.engine.use_idle_moment():
        pass
    captures, kinds = flying.counters["captures"], flying.forms(1, BEST)
    assert captures == len(flying.captured) == 2 * len(kinds) * 3
    chosen = replace(trees(spec, kind), adaptive=True)
    assert len(kinds) <= _kinds_of_rounds(chosen), "memory is kept for these"
    for count in (4, 2, 1):
        for params in ([LONG] * count, [SURE] * count):
            check(llm, folder, torn[folder][:count], params)
    assert flying.counters["captures"] == captures
    assert sources.rounds.keys() == {"model", "both", "text"}
    assert {form.num_steps for form in sources.forms} == {0, 1, 2, 3, NODES - 1}
    assert any(one.from_lookup for one in seen)
    assert not fallbacks(flying)


@ON_CPU
@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
def test_depths_are_chosen_by_cost(
    name: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands is learned by who drafted it, and costs from rounds with drafts and without."""
    folder, spec = folders[name]
    llm = make(folder, trees(spec, "both", adaptive=True))
    flying, sources = flying_of(llm, monkeypatch)
    flying.steps = [0, 1, 2, 3, NODES - 1]
    steps, parts = AdaptiveSteps(flying.steps, model_steps=3, pads=True), llm.engine.parts
    llm.engine.flights = Flights(flying, parts.drafter, parts.scheduler, steps, overlaps=True)
    for params in ([LONG] * 3, [SURE] * 3, [LONG] * 3):
        check(llm, folder, torn[folder][:3], params)
    acceptance = steps.acceptance
    assert isinstance(acceptance, HybridAcceptance)
    assert acceptance.model.smallest.tried[0] > 0
    assert acceptance.lookup.smallest.tried[0] > 0
    assert 0.0 < acceptance.lookup_share < 1.0
    assert steps.standing(3) is not None
    assert None not in {steps.costs.of(4, one) for one in flying.steps}
    assert len(Counter(form.num_steps for form in sources.forms)) > 2
    assert not fallbacks(flying)


@ON_CPU
@pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
def test_the_end_of_the_context(
    name: str, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nodes would lie past it, rounds are the host's, and counted."""
    folder, spec = folders[name]
    context = {"context_length": 300}
    llm = make(folder, trees(spec, "both"), **context)
    flying, _ = flying_of(llm, monkeypatch)
    params = [replace(one, max_tokens=None) for one in (LONG, LONG, SURE)]
    given = [*torn[folder][:2], torn[folder][2][:280]]
    plain = make(folder, None, **context)
    found, expected = (one.generate(given, params) for one in (llm, plain))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert {len(one.prompt_ids) + len(one.token_ids) for one in found} == {300}
    assert fallbacks(flying) == {"memory nearly full"}
    assert flying.counters["replays"] > 10
