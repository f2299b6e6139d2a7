"""Chains whose drafts may be nearly as good as the target's own tokens, in rounds on the device
alone: seeds say what they say in rounds of the host, and so do greedy requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.engine.graph_relaxed import GraphRelaxedRound
from specengine.engine.llm import Generation
from specengine.engine.row_choices import Choosing
from specengine.kernels import accept_chain, accept_relaxed, edit_rows, sample_rows
from tests.engine import test_graph_weighed, test_weighed_text, test_weighed_wishes
from tests.engine.flying_world import come_and_go, let_fly
from tests.engine.test_graph_mtp import SEEN_TOO_LITTLE
from tests.engine.test_graph_round import GREEDY, SAMPLED, make
from tests.engine.test_graph_weighed import MANY, ON_CPU, fallbacks, flags, let_drafters_fly
from tests.engine.test_weighed_wishes import said
from tests.halves import slow_but

Folders = dict[str, tuple[Path, SpecConfig]]

RULE: dict[str, Any] = {"verify": "relaxed", "relaxed_top_k": 4, "relaxed_delta": 0.02}
RELAXED_BEST = Choosing(weighs=True)
WISHES = {
    "ends": test_graph_weighed.WISHES,
    # Somebody who wishes for something and nobody who samples, beside those of other rules.
    "greedy": [
        replace(GREEDY, max_tokens=20),
        replace(GREEDY, max_tokens=None),
        replace(GREEDY, max_tokens=26),
    ],
    "greedy edits": [
        replace(GREEDY, max_tokens=26, repetition_penalty=1.5),
        replace(GREEDY, max_tokens=20, logprobs=2),
    ],
    "greedy grammars": [
        replace(one, temperature=0.0) for one in test_weighed_wishes.WISHES["grammars"]
    ],
    "text": test_weighed_text.ENDS,
    **test_weighed_wishes.WISHES,
}
CASES = [  # algorithm, whether drafts are drawn, overlap; of the first four is the fast half
    ("EAGLE3", False, True),
    ("STANDALONE", False, True),
    ("EAGLE3", True, True),
    ("STANDALONE", True, False),
    ("EAGLE", False, True),
    ("MTP layers", False, True),
    ("EAGLE3", False, False),
]
TEXTS = {name: replace(one, **RULE) for name, one in test_weighed_text.SPECS.items()}


def check(host: LLM, llm: LLM, wish: str) -> list[Generation]:
    found = test_weighed_wishes.check(host, llm, WISHES[wish])
    assert all(one.spec.is_lossy for one in found)
    return found


def pair_of(folders: Folders, name: str, drawn: bool = False, **more: Any) -> tuple[LLM, LLM]:
    """The host's rounds, and those that are to fly."""
    folder, given = folders[name]
    spec = replace(given, draft_sampling=drawn, **RULE)
    host, llm = (make(folder, spec, **flags(**more)) for _ in range(2))
    let_drafters_fly(llm)
    return host, llm


@ON_CPU
@pytest.mark.parametrize(
    ("name", "drawn", "overlaps", "wish"),
    slow_but(
        [(*CASES[(n + k) % 4], wish) for n, wish in enumerate(WISHES) for k in (0, 2)],
        [(*case, wish) for case in CASES for wish in WISHES],
    ),
)
def test_seeds_say_what_they_say_on_the_host(
    name: str,
    drawn: bool,
    overlaps: bool,
    wish: str,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, llm = pair_of(folders, name, drawn)
    flying = let_fly(llm, monkeypatch, overlaps, most=8)
    assert isinstance(flying, GraphRelaxedRound)
    check(host, llm, wish)
    assert not fallbacks(flying)
    assert flying.counters["replays"] > 5
    assert all(form.choosing.weighs for form in flying.captured)
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert 1 < totals.num_accepted_tokens < totals.num_draft_tokens


@ON_CPU
def test_what_stands_is_not_what_matching_leaves(
    folders: Folders, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy requests neither: or the other tests would show nothing."""
    _, llm = pair_of(folders, "EAGLE3")
    flying = let_fly(llm, monkeypatch)
    params = [replace(SAMPLED[0], max_tokens=20), GREEDY]
    found, matched = llm.generate(MANY[:2], params), make(target, None).generate(MANY[:2], params)
    assert all(a.token_ids != b.token_ids for a, b in zip(found, matched, strict=True))
    llm.generate(MANY[:2], [GREEDY] * 2)
    assert RELAXED_BEST in {form.choosing for form in flying.captured}


@ON_CPU
@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever earlier rounds have left behind short drafts; and where there is none, rounds of
    greedy requests are plain."""
    host, llm = (make(target, TEXTS[name], **flags()) for _ in range(2))
    flying = let_fly(llm, monkeypatch, most=8)
    assert isinstance(flying, GraphRelaxedRound)
    for wish in ("text", "greedy", "all"):
        check(host, llm, wish)
    assert not fallbacks(flying)
    assert {form.num_steps for form in flying.captured} > {0, 3}
    assert llm.engine.scheduler.spec_totals == host.engine.scheduler.spec_totals


@ON_CPU
@pytest.mark.parametrize(
    ("name", "drawn"), [("EAGLE3", False), ("EAGLE3", True), ("MTP layers", False), ("NGRAM", None)]
)
def test_requests_come_and_go_between_both_kinds_of_rounds(
    name: str,
    drawn: bool | None,
    folders: Folders,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever runs around it, a request says what it says alone."""
    more = flags(disable_radix_cache=True)
    if drawn is None:
        host, llm = (make(target, TEXTS[name], **more) for _ in range(2))
    else:
        host, llm = pair_of(folders, name, drawn, **more)
    flying = let_fly(llm, monkeypatch, most=8)
    wishes = [one for wish in ("ends", "greedy", "all", "grammars") for one in WISHES[wish]]
    come_and_go(host, llm, MANY, wishes, monkeypatch)
    assert flying.counters["replays"] > 20
    assert not fallbacks(flying)


@ON_CPU
def test_kernels_decide_what_the_reference_does(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    host, llm = pair_of(folders, "EAGLE3")
    flying = let_fly(llm, monkeypatch)
    params = [replace(one, max_tokens=7) for one in (*WISHES["all"][:2], GREEDY)]
    expected = [*said(host.generate(MANY[:3], params))]
    for module in (sample_rows, accept_relaxed, accept_chain, edit_rows):
        monkeypatch.setattr(module, "use_triton", lambda backend, x: True)
    assert [*said(llm.generate(MANY[:3], params))] == expected
    assert not fallbacks(flying)


@ON_CPU
def test_graphs_at_start_and_of_idle_moments_are_those_that_rounds_need(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, llm = pair_of(folders, "EAGLE3")
    flying = let_fly(llm, monkeypatch)
    flying.capture()
    for params in (GREEDY, SAMPLED[0]):
        before = flying.counters["captures"]
        llm.generate(MANY[:3], [params] * 3)
        assert flying.counters["captures"] == before
        while llm.engine.use_idle_moment():
            pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize(
        ("name", "drawn"),
        [
            *((name, False) for name in ("EAGLE", "EAGLE3", "MTP layers", "STANDALONE", *TEXTS)),
            ("EAGLE3", True),
        ],
    )
    def test_graphs_change_nothing(
        self, name: str, drawn: bool, overlap: bool, folders: Folders, target: Path
    ) -> None:
        folder, given = folders.get(name, (target, TEXTS.get(name)))
        spec = replace(given or SpecConfig(), draft_sampling=drawn, **RULE)
        more = flags(disable_radix_cache=True, disable_overlap_schedule=not overlap)
        host = make(folder, spec, disable_cuda_graph=True, **more)
        llm = make(folder, spec, **more)
        for wish in WISHES:
            check(host, llm, wish)
        stats = llm.engine.stats().graphs["round"]
        assert stats.replays > 40
        assert stats.fallbacks.keys() <= {SEEN_TOO_LITTLE}
