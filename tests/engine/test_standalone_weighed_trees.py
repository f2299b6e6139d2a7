"""Trees of a smaller model under verifiers that weigh the target against the draft, in rounds on
the device alone: a seed says what it says in rounds of the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.flying_world import come_and_go, let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS, SAMPLED, make
from tests.engine.test_graph_round import let_fly as allow
from tests.engine.test_graph_weighed import CONTEXT, MANY, ON_CPU, check, fallbacks, flags
from tests.engine.test_graph_weighed_tree import (
    NEARLY_FULL,
    RULES,
    WISHES,
    assert_flew,
    check_in_the_interpreter,
    pair_on_the_gpu,
    with_rule,
)

from specengine import LLM, SpecConfig
from specengine.engine.graph_weighed_tree import GraphWeighedTreeRound
from tests.engine.test_standalone_trees import SHAPES, Folders, specs_of
from tests.halves import thinned


@pytest.fixture(scope="module")
def specs(folders: Folders) -> dict[str, SpecConfig]:
    return {name: replace(one, adaptive=True) for name, one in specs_of(folders).items()}


def pair_of(target: Path, spec: SpecConfig, rule: str, **more: Any) -> tuple[LLM, LLM]:
    """The host's rounds, and those that are to fly."""
    host, llm = (make(target, with_rule(spec, rule), **flags(**more)) for _ in range(2))
    allow(llm)
    return host, llm


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "overlaps"),
    thinned(2, RULES, [*((name, True) for name in SHAPES), ("3", False)]),
)
def test_seeds_say_what_they_say_on_the_host(
    rule: str,
    name: str,
    overlaps: bool,
    target: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, llm = pair_of(target, specs[name], rule)
    flying = let_fly(llm, monkeypatch, overlaps, most=8)
    assert isinstance(flying, GraphWeighedTreeRound)
    found = check(host, llm)
    assert fallbacks(flying) == {NEARLY_FULL}
    assert flying.counters["replays"] > 8
    assert any(form.choosing.weighs for form in flying.captured)
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert 10 < totals.num_accepted_tokens < totals.num_draft_tokens - 10
    lengths = [len(one.prompt_ids) + len(one.token_ids) for one in found]
    assert lengths.count(CONTEXT) == 2


@ON_CPU
@pytest.mark.parametrize(("rule", "count"), thinned(3, RULES, [1, 2, 4]))
def test_the_last_rounds_of_requests_that_end_by_themselves(
    rule: str,
    count: int,
    target: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nobody is near the context's end, every round flies: the last ones draft less."""
    host, llm = pair_of(target, specs["3"], rule, context_length=160)
    flying = let_fly(llm, monkeypatch, most=4)
    for seed in range(8):
        params = [replace(SAMPLED[4], seed=seed, max_tokens=3 + seed + 3 * i) for i in range(count)]
        check(host, llm, params, MANY[:count])
    assert not fallbacks(flying)
    assert all(form.choosing.weighs for form in flying.captured)


@ON_CPU
@pytest.mark.parametrize(("rule", "name"), thinned(2, RULES, ["3", "few nodes"]))
def test_requests_come_and_go_between_both_kinds_of_rounds(
    rule: str,
    name: str,
    target: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, llm = pair_of(target, specs[name], rule, disable_radix_cache=True)
    flying = let_fly(llm, monkeypatch, most=8)
    come_and_go(host, llm, MANY, WISHES, monkeypatch)
    assert flying.counters["replays"] > 10
    assert fallbacks(flying) <= {NEARLY_FULL}


@ON_CPU
# The interpreter takes ten seconds a rule.
@pytest.mark.parametrize(
    "rule",
    [one if one == "sibling" else pytest.param(one, marks=pytest.mark.slow) for one in RULES],
)
def test_kernels_decide_what_the_reference_does(
    rule: str, target: Path, specs: dict[str, SpecConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    host, llm = pair_of(target, specs["2"], rule)
    flying = let_fly(llm, monkeypatch)
    params = [replace(one, max_tokens=7) for one in (SAMPLED[2], GREEDY)]
    check_in_the_interpreter(host, llm, PROMPTS[:2], params, monkeypatch)
    assert not fallbacks(flying)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", SHAPES)
    @pytest.mark.parametrize("rule", RULES)
    def test_graphs_change_nothing(
        self, rule: str, name: str, overlap: bool, target: Path, specs: dict[str, SpecConfig]
    ) -> None:
        host, llm = pair_on_the_gpu(target, with_rule(specs[name], rule), overlap)
        for count in (8, 3, 1):
            check(host, llm, WISHES[:count], MANY[:count])
        assert_flew(llm, 20)
