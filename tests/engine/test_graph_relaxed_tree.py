"""Trees whose nodes may be nearly as good as the target's own tokens, in rounds on the device
alone: a request says what it says in rounds of the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.core.sampling import SpecControl
from specengine.engine.graph_relaxed import GraphRelaxedTreeRound
from specengine.kernels import accept_relaxed, edit_rows, sample_rows, tree_shape
from tests.engine import test_graph_weighed_tree, test_weighed_text_trees
from tests.engine.flying_world import come_and_go, let_fly
from tests.engine.test_graph_relaxed import RULE, WISHES
from tests.engine.test_graph_round import GREEDY, SAMPLED, make
from tests.engine.test_graph_weighed import MANY, ON_CPU, check, fallbacks, flags
from tests.engine.test_graph_weighed_tree import (
    NEARLY_FULL,
    Folders,
    assert_flew,
    check_in_the_interpreter,
    pair_on_the_gpu,
)
from tests.engine.test_graph_weighed_tree import folders as folders
from tests.engine.test_weighed_text_trees import prompts as prompts
from tests.engine.test_weighed_tree_wishes import shortened
from tests.engine.test_weighed_wishes import check as check_wishes
from tests.halves import slow_but

SHAPES = [  # and whether trees are sampled
    *((name, False) for name in ("EAGLE, 2", "EAGLE3, 3", "EAGLE3, few nodes", "MTP, 2")),
    ("EAGLE3, 4, static", True),
    ("EAGLE3, 3", True),
]
FLYING_WISHES = [name for name in WISHES if name not in ("ends", "text")]
DRAWN_SHAPES = [one for one in SHAPES[1:] if one[1]]
FAST_WISHES = [(*DRAWN_SHAPES[n % 2], wish) for n, wish in enumerate(FLYING_WISHES)]
TEXTS = {name: replace(one, **RULE) for name, one in test_weighed_text_trees.SPECS.items()}


def spec_of(folders: Folders, name: str, drawn: bool) -> SpecConfig:
    return replace(folders[name][1], draft_sampling=drawn, **RULE)


def pair_of(folders: Folders, name: str, drawn: bool, **more: Any) -> tuple[LLM, LLM]:
    """The host's rounds, and those that are to fly."""
    spec = spec_of(folders, name, drawn)
    host, llm = (make(folders[name][0], spec, **flags(**more)) for _ in range(2))
    return host, llm


def text_pair(name: str, target: Path) -> tuple[LLM, LLM]:
    given = test_weighed_text_trees.given()
    return make(target, TEXTS[name], **given), make(target, TEXTS[name], **given)


@ON_CPU
@pytest.mark.parametrize(
    ("name", "drawn", "overlaps"),
    [*((*one, True) for one in SHAPES), ("EAGLE3, 3", False, False), ("EAGLE3, 3", True, False)],
)
def test_seeds_say_what_they_say_on_the_host(
    name: str, drawn: bool, overlaps: bool, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As requests end by max_tokens and by context, as they limit themselves, and greedy ones."""
    host, llm = pair_of(folders, name, drawn)
    flying = let_fly(llm, monkeypatch, overlaps, most=8)
    assert isinstance(flying, GraphRelaxedTreeRound)
    found = check(host, llm, test_graph_weighed_tree.WISHES)
    check(host, llm, WISHES["greedy"], MANY[:3])
    assert all(one.spec.is_lossy for one in found)
    assert fallbacks(flying) == {NEARLY_FULL}
    assert flying.counters["replays"] > 5
    assert all(form.choosing.weighs for form in flying.captured)
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert 10 < totals.num_accepted_tokens < totals.num_draft_tokens - 10


@ON_CPU
@pytest.mark.parametrize(
    ("name", "drawn", "wish"),
    slow_but(FAST_WISHES, [(*one, wish) for one in SHAPES[1:] for wish in FLYING_WISHES]),
)
def test_wishes_fly(
    name: str, drawn: bool, wish: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody comes near the context's end. What grammars cut lies among what they leave."""
    host, llm = pair_of(folders, name, drawn, context_length=160)
    flying = let_fly(llm, monkeypatch, most=8)
    check_wishes(host, llm, shortened(WISHES[wish]))
    assert not fallbacks(flying)
    assert all(form.choosing.weighs for form in flying.captured)
    assert llm.engine.scheduler.spec_totals == host.engine.scheduler.spec_totals


@ON_CPU
@pytest.mark.parametrize("name", TEXTS)
def test_trees_of_text(
    name: str, target: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, llm = text_pair(name, target)
    flying = let_fly(llm, monkeypatch, most=8)
    assert isinstance(flying, GraphRelaxedTreeRound)
    check(host, llm, test_weighed_text_trees.ENDS, prompts)
    for count in (1, 3):  # what larger rounds have left stands behind
        check(host, llm, [replace(GREEDY, max_tokens=50)] * count, prompts[:count])
    assert fallbacks(flying) <= {NEARLY_FULL}
    assert {form.num_steps for form in flying.captured} == {*flying.steps}
    assert llm.engine.scheduler.spec_totals == host.engine.scheduler.spec_totals


@ON_CPU
@pytest.mark.parametrize(("name", "drawn"), [("EAGLE3, 3", False), ("EAGLE3, 3", True)])
def test_requests_come_and_go_between_both_kinds_of_rounds(
    name: str, drawn: bool, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever runs around it, a request says what it says alone."""
    host, llm = pair_of(folders, name, drawn, disable_radix_cache=True, context_length=160)
    flying = let_fly(llm, monkeypatch, most=8)
    wishes = [one for wish in ("ends", "greedy", "all", "grammars") for one in WISHES[wish]]
    come_and_go(host, llm, MANY, shortened(wishes, 30), monkeypatch)
    assert flying.counters["replays"] > 10
    assert fallbacks(flying) <= {NEARLY_FULL}


@ON_CPU
def test_kernels_decide_what_the_reference_does(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    host, llm = pair_of(folders, "EAGLE3, 2", False)
    flying = let_fly(llm, monkeypatch)
    wishes = SAMPLED[2], GREEDY, replace(SAMPLED[3], speculative=SpecControl(num_steps=2))
    params = [replace(one, max_tokens=7) for one in (*wishes, WISHES["grammars"][3])]
    check_in_the_interpreter(
        host, llm, MANY[:4], params, monkeypatch, accept_relaxed, sample_rows, tree_shape, edit_rows
    )
    assert not fallbacks(flying)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize(("name", "drawn"), SHAPES)
    def test_graphs_change_nothing(
        self, name: str, drawn: bool, overlap: bool, folders: Folders
    ) -> None:
        spec = spec_of(folders, name, drawn)
        host, llm = pair_on_the_gpu(folders[name][0], spec, overlap, context_length=160)
        for count in (8, 3, 1):
            check(host, llm, test_graph_weighed_tree.WISHES[:count], MANY[:count])
        for params in WISHES.values():
            check_wishes(host, llm, shortened(params))
        assert_flew(llm, 40)

    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", TEXTS)
    def test_trees_of_text(
        self, name: str, overlap: bool, target: Path, prompts: list[Any]
    ) -> None:
        context = test_weighed_text_trees.CONTEXT
        host, llm = pair_on_the_gpu(target, TEXTS[name], overlap, context_length=context)
        for count in (8, 3, 1):
            check(host, llm, test_weighed_text_trees.ENDS[:count], prompts[:count])
        check(host, llm, [replace(GREEDY, max_tokens=50)] * 3, prompts[:3])
        assert_flew(llm, 40)
