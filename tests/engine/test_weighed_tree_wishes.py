"""Edits of logits, logprobs and grammars under verifiers that weigh trees, in rounds on the device
alone: a seed says what it says in rounds of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specengine import LLM, GrammarSpec, SamplingParams
from specengine.kernels import (
    edit_rows,
)
from specengine.kernels.accept_sampled import Accepted, Draws, SampledRound
from tests.engine.flying_world import come_and_go, let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS, SAMPLED, make
from tests.engine.test_graph_weighed import MANY, ON_CPU, fallbacks, flags
from tests.engine.test_graph_weighed_tree import (
    RULES,
    SHAPES,
    Folders,
    assert_flew,
    check_in_the_interpreter,
    pair_on_the_gpu,
    with_rule,
)
from tests.engine.test_graph_weighed_tree import folders as folders
from tests.engine.test_weighed_wishes import ALSO, WISHES, check
from tests.halves import thinned

NAMES = ["EAGLE, 2", "EAGLE3, 3", "EAGLE3, 4, static", "MTP, 2"]
TOLD = replace(SAMPLED[4], logprobs=2, max_tokens=20)
RULED = replace(SAMPLED[4], grammar=GrammarSpec.regex("[a-c ]{4,30}"), ignore_eos=False)
EDITED = replace(SAMPLED[0], frequency_penalty=0.6, max_tokens=20)


def pair_of(folders: Folders, name: str, rule: str, **more: Any) -> tuple[LLM, LLM]:
    """The host's rounds, and those that are to fly; nobody comes near the context's end."""
    folder, given = folders[name]
    spec, more = with_rule(given, rule), flags(**{"context_length": 160} | more)
    return make(folder, spec, **more), make(folder, spec, **more)


def shortened(params: list[SamplingParams], most: int = 40) -> list[SamplingParams]:
    return [replace(one, max_tokens=min(one.max_tokens or most, most)) for one in params]


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "name", "overlaps", "wish"),
    thinned(4, RULES, [*((name, True) for name in NAMES), ("EAGLE3, 3", False)], WISHES),
)
def test_wishes_fly(
    rule: str,
    name: str,
    overlaps: bool,
    wish: str,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, llm = pair_of(folders, name, rule)
    flying = let_fly(llm, monkeypatch, overlaps, most=8)
    check(host, llm, shortened(WISHES[wish]))
    assert not fallbacks(flying)
    assert flying.counters["replays"] > 10
    assert ALSO[wish] in {form.choosing for form in flying.captured if form.num_steps}
    totals = llm.engine.scheduler.spec_totals
    assert 1 < totals.num_accepted_tokens < totals.num_draft_tokens - 10


@ON_CPU
@pytest.mark.parametrize(
    ("wish", "choosing"),
    [(EDITED, "edits"), (TOLD, "logprobs"), (RULED, "grammars")],
    ids=["edits", "logprobs", "grammars"],
)
def test_greedy_requests_alone_are_matched(
    wish: SamplingParams, choosing: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they wish for."""
    host, llm = pair_of(folders, "EAGLE3, 3", "sibling")
    flying = let_fly(llm, monkeypatch)
    params = [replace(wish, temperature=0.0), GREEDY]
    found, expected = (one.generate(PROMPTS[:2], params) for one in (llm, host))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert ALSO[choosing]._replace(weighs=False) in {form.choosing for form in flying.captured}
    assert not any(form.choosing.weighs for form in flying.captured)
    assert not fallbacks(flying)


@ON_CPU
@pytest.mark.parametrize(("rule", "name"), thinned(2, RULES, ["EAGLE3, 3", "MTP, 2"]))
def test_those_with_wishes_come_and_go(
    rule: str, name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is in the batch: each says what it says alone, on the host."""
    host, llm = pair_of(folders, name, rule, disable_radix_cache=True)
    flying = let_fly(llm, monkeypatch, most=8)
    wishes = [one for params in WISHES.values() for one in params]
    come_and_go(host, llm, MANY, shortened(wishes, 30), monkeypatch)
    assert flying.counters["replays"] > 20
    assert not fallbacks(flying)


@ON_CPU
@pytest.mark.parametrize("rule", RULES)
def test_nodes_have_the_numbers_that_the_host_gives_them(
    rule: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that a grammar leaves, wherever they lie among others that it has cut."""
    host, llm = pair_of(folders, "EAGLE3, 3", rule)
    trees: dict[LLM, dict[tuple[int, int], Any]] = {host: {}, llm: {}}
    gaps = 0
    for one in (host, llm):
        kernel = one.engine.parts.verifier.kernel

        def judge(
            drafts: SampledRound, draws: Draws, *, one: LLM = one, kernel: Any = kernel, **more: Any
        ) -> Accepted:
            nonlocal gaps
            for b, places in enumerate(drafts.exists_BN):
                at = places.nonzero()[:, 0]
                numbers = drafts.nodes() if drafts.numbers_BN is None else drafts.numbers_BN
                assert numbers[b, at].tolist() == [*range(len(at))]
                gaps += at.tolist() != [*range(len(at))]
                tokens, depths = drafts.tokens_BN[b, at], drafts.depths_BN[b, at]
                parents = numbers[b, drafts.parents_BN[b, at]]
                key = int(draws.seeds_B[b]), int(draws.positions_B[b])
                trees[one][key] = tokens.tolist(), parents.tolist(), depths.tolist()
            return kernel(drafts, draws, **more)

        monkeypatch.setattr(one.engine.parts.verifier, "kernel", judge)
    let_fly(llm, monkeypatch, most=8)
    wishes = [replace(one, seed=n + 1) for n, one in enumerate(shortened(WISHES["grammars"]))]
    check(host, llm, wishes)
    assert gaps > 3
    assert trees[llm].items() >= trees[host].items()


@ON_CPU
# The interpreter takes ten seconds a rule.
@pytest.mark.parametrize(
    "rule",
    [one if one == "sibling" else pytest.param(one, marks=pytest.mark.slow) for one in RULES],
)
def test_kernels_decide_what_the_reference_does(
    rule: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    host, llm = pair_of(folders, "EAGLE3, 2", rule)
    flying = let_fly(llm, monkeypatch)
    params = [replace(one, max_tokens=7) for one in (*WISHES["all"][:3], WISHES["grammars"][3])]
    check_in_the_interpreter(host, llm, MANY[:4], params, monkeypatch, edit_rows)
    assert not fallbacks(flying)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", SHAPES)
    @pytest.mark.parametrize("rule", RULES)
    def test_graphs_change_nothing(
        self, rule: str, name: str, overlap: bool, folders: Folders
    ) -> None:
        folder, spec = folders[name]
        host, llm = pair_on_the_gpu(folder, with_rule(spec, rule), overlap, context_length=160)
        for params in WISHES.values():
            check(host, llm, shortened(params))
        assert_flew(llm, 40)
