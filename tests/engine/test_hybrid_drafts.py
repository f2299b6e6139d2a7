"""What hybrids' rounds on the device are made of, and which hybrids have such rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specengine import LLM, SpecConfig
from specengine.core.batch import RowBatch
from specengine.core.spec import DraftProposal, HesitantRowDrafter, RowDrafter, VerifyResult
from specengine.draft.hybrid import HybridDrafter
from specengine.draft.proposals import Draft, assemble
from specengine.draft.suffix.drafter import SuffixDrafter
from specengine.engine.adaptive.acceptance import HybridAcceptance
from specengine.engine.adaptive.costs import RunningCosts
from specengine.engine.adaptive.estimate import HostSeconds
from specengine.engine.flights import Flights
from specengine.engine.graph_build import _depths, _row_drafter, make_graph_round
from specengine.engine.graph_hybrid import GraphHybridRound, GraphHybridTreeRound
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_weighed_hybrid import (
    GraphRelaxedHybridRound,
    GraphRelaxedHybridTreeRound,
    GraphWeighedHybridRound,
    GraphWeighedHybridTreeRound,
)
from specengine.engine.host_drafts import HostDrafts
from specengine.engine.hybrid_drafts import HybridDrafts
from specengine.engine.ragged_build import _kinds_of_rounds
from specengine.engine.round_form import Form, Wish
from specengine.engine.row_choices import BEST
from tests.engine.hybrid_world import LONG, fly, hybrid, make
from tests.engine.test_depth_in_results import ON_CPU
from tests.engine.test_flights import ScriptedRound, request
from tests.engine.test_graph_round import DeviceLengths
from tests.engine.test_no_graphs import with_graphs

CPU = torch.device("cpu")
DEEP, NONE = Draft([9, 1, 2, 3, 4, 5]), Draft([9])
Folders = dict[str, tuple[Path, SpecConfig]]


class Model:
    """Drafts 50 and what follows it; three levels."""

    row_steps = 3

    def __init__(self) -> None:
        self.calls: list[str] = []

    def draft_rows(self, rows: RowBatch, num_steps: int, picks: Any = None) -> Tensor:
        self.calls.append(f"draft {num_steps}")
        return (50 + torch.arange(num_steps)).expand(len(rows.rows_B), -1)

    def observe_rows(self, rows: Any, output: Any, tokens_BN: Tensor, accepted_B: Any) -> None:
        self.calls.append(f"observe {tokens_BN.shape[1]}")


class LateModel(Model):
    def catch_up_rows(self, rows: Any, tokens_BN: Tensor) -> None:
        self.calls.append(f"catch up {tokens_BN.shape[1]}")


def drafts_of(inner: Model | None = None, num_steps: int = 5) -> HybridDrafts:
    return HybridDrafts(inner or Model(), cast(Any, None), 4, num_steps, CPU)


def rows_of(size: int) -> RowBatch:
    return RowBatch(*[torch.ones(size, dtype=torch.int64)] * 3)


@pytest.mark.parametrize(
    ("drafts", "levels", "wish"),
    [
        ([NONE, NONE], [5, 1], Wish([3, 1])),
        ([NONE, NONE], [2, 0], Wish([2, 0])),
        ([DEEP, NONE], [5, 5], Wish([5, 3], model_steps=3)),
        ([Draft([9, 1]), NONE], [5, 2], Wish([1, 2], model_steps=2)),
        ([Draft([9, 1]), NONE], [1, 1], Wish([1, 1], model_steps=1)),
        ([DEEP, Draft([9, 1])], [5, 5], Wish([5, 1], model_steps=0)),
        ([DEEP, NONE], [5, 0], Wish([5, 0], model_steps=0)),
    ],
)
def test_what_a_round_is_to_be(drafts: list[Draft], levels: list[int], wish: Wish) -> None:
    of_text = None if wish.model_steps is None else [draft is not NONE for draft in drafts]
    assert drafts_of().set_beside(assemble(drafts), levels) == wish._replace(of_text=of_text)


def test_text_stands_in_place_of_the_models_drafts() -> None:
    drafts = drafts_of()
    drafts.set_beside(assemble([DEEP, DEEP, DEEP, DEEP]), [5] * 4)
    proposal = assemble([NONE, DEEP, Draft([9, 1, 2])])
    proposal.num_nodes[1] = 5  # cut to what the request allows: the last token is nobody's
    drafts.set_beside(proposal, [5] * 3)
    found = drafts.beside_text(3).draft_rows(rows_of(4), 5)
    assert found[:3].tolist() == [[50, 51, 52, 0, 0], [1, 2, 3, 4, 0], [1, 2, 0, 0, 0]]
    shallow = drafts.beside_text(3).draft_rows(rows_of(3), 3)
    assert shallow.tolist() == found[:3, :3].tolist()
    drafts.set_beside(assemble([Draft([9, 7]), DEEP]), [5] * 2)
    found = drafts.beside_text(0).draft_rows(rows_of(2), 5)
    assert found.tolist() == [[7, 0, 0, 0, 0], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("num_steps", [3, 4, 5])
def test_text_begins_where_no_kernel_is_compiled_anew(num_steps: int) -> None:
    found = drafts_of().beside_text(0).draft_rows(rows_of(2), num_steps)
    assert found.data_ptr() % 16 == 0


@pytest.mark.parametrize("kind", [Model, LateModel])
def test_who_is_called(kind: type[Model]) -> None:
    """A model that was not asked to draft observes, and where others drafted it catches up."""
    inner = kind()
    drafts, rows, tokens = drafts_of(inner), rows_of(2), torch.zeros(2, 6, dtype=torch.int64)
    given: Any = rows, None, tokens, None
    late = ["catch up 6"] if kind is LateModel else []
    drafts.draft_rows(rows, 2)
    drafts.observe_rows(*given)
    assert inner.calls == ["draft 2", "observe 6"]
    for steps, calls in ((3, ["draft 3"]), (0, [])):
        inner.calls.clear()
        beside = drafts.beside_text(steps)
        beside.draft_rows(rows, 5)
        beside.observe_rows(*given)
        assert inner.calls == [*calls, *late, "observe 6"]


def test_it_hesitates_as_the_model_does() -> None:
    class Hesitant(Model):
        def is_ready(self, req: Any) -> bool:
            return bool(req.is_ready)

    drafts = drafts_of(Hesitant())
    assert isinstance(drafts, HesitantRowDrafter)
    reqs = [cast(Any, SimpleNamespace(is_ready=ready)) for ready in (True, False)]
    assert [drafts.is_ready(req) for req in reqs] == [True, False]
    assert [drafts_of().is_ready(req) for req in reqs] == [True, True]


@ON_CPU
@pytest.mark.parametrize("most_nodes", [4, 8])
def test_graphs_of_each_kind(
    most_nodes: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's alone, those in which some have text, and those in which all have. None is
    deeper than was chosen but where all have text, which is padded."""
    folder, spec = folders["EAGLE3"]
    flying, _ = fly(make(folder, hybrid(spec, most_nodes)), monkeypatch)
    most = most_nodes - 1
    alone, deep = Form(2, 3), [] if most == 3 else [Form(2, most)]
    some, everyone = Form(2, 3, model_steps=3), [Form(2, n, model_steps=0) for n in {3, most}]
    assert flying.steps == sorted({3, most})
    assert len(flying.forms(2, BEST)) <= _kinds_of_rounds(hybrid(spec, most_nodes))
    assert [*flying.forms(2, BEST)] == [alone, *deep, some, *everyone]
    reqs = [cast(Any, SimpleNamespace(req_pool_idx=1, sampling=LONG, grammar=None))] * 2
    monkeypatch.setattr(flying.choices, "choosing_of", lambda reqs: BEST)
    assert flying._form(reqs, Wish([3, 1])) == alone
    assert flying._form(reqs, Wish([1, 2], model_steps=3)) == some
    assert flying._form(reqs, Wish([1, 2], model_steps=0)) == everyone[0]
    assert flying._form(reqs, Wish([most, 3], model_steps=3)) == [some, *deep][-1]
    assert flying._form(reqs, Wish([most, 1], model_steps=0)) == everyone[-1]
    flying.steps = [0, 1, 2, *flying.steps]
    for depth in (1, 2, 3):
        shallow = Form(2, depth, model_steps=depth)
        assert shallow in flying.forms(2, BEST)
        assert flying._form(reqs, Wish([depth, 1], model_steps=1)) == shallow
    assert flying._form(reqs, Wish([2, 1], model_steps=0)) == everyone[0]


@ON_CPU
@pytest.mark.parametrize(
    ("deepest", "most_nodes", "steps"),
    [(3, 4, [0, 1, 2, 3]), (3, 8, [0, 1, 2, 3, 7]), (5, 9, [0, 1, 2, 3, 5, 8])],
)
def test_what_the_engine_makes(
    deepest: int,
    most_nodes: int,
    steps: list[int],
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Costs are learned, and start from what the device takes."""
    folder, spec = folders["EAGLE3"]
    llm = make(folder, hybrid(replace(spec, num_steps=deepest), most_nodes, adaptive=True))
    made = made_of(llm)
    assert isinstance(made, GraphHybridRound)
    assert len(made.forms(2, BEST)) <= _kinds_of_rounds(llm.engine.parts.config.spec)
    assert made.steps == steps
    assert not made.may_sleep
    assert made.samples
    monkeypatch.setattr(made, "seconds_of", lambda size, steps, nodes=None, text=0: 1.0 + steps)
    depths = _depths(made, None, HostSeconds(True))
    assert depths.steps == steps
    assert isinstance(depths.costs, RunningCosts)
    assert depths.costs.of(2, steps[-1]) == 1.0 + steps[-1]
    assert depths.host is None
    assert isinstance(depths.acceptance, HybridAcceptance)
    assert depths.acceptance.model.depth == deepest
    assert depths.acceptance.lookup.depth == steps[-1]


def made_of(llm: LLM) -> GraphRound | str:
    config, drafter = with_graphs(llm), llm.engine.drafter
    inner: Any = getattr(drafter, "inner", drafter)
    if hasattr(inner, "flies"):
        inner.flies = True
    for runner in (llm.engine.parts.worker.runner, *getattr(inner, "runners", ())):
        runner.attn_backend = DeviceLengths(CPU)
    return make_graph_round(config, llm.engine.parts)


@ON_CPU
@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("EAGLE3", {}, GraphHybridRound),
        ("STANDALONE", {}, GraphHybridRound),
        ("MTP layers", {}, GraphHybridRound),
        ("EAGLE3", {"simulate_accept_length": 2.5}, GraphHybridRound),
        ("EAGLE3", {"suffix_branches": 2}, GraphHybridTreeRound),
        ("MTP layers", {"suffix_branches": 2}, GraphHybridTreeRound),
        ("EAGLE3", {"eagle_topk": 2}, GraphHybridTreeRound),
        ("STANDALONE", {"eagle_topk": 2, "suffix_branches": 2}, GraphHybridTreeRound),
        ("EAGLE3", {"eagle_topk": 2, "simulate_accept_length": 2.5}, GraphHybridTreeRound),
        ("EAGLE3", {"verify": "target_only"}, GraphWeighedHybridRound),
        ("EAGLE3", {"draft_sampling": True}, GraphWeighedHybridRound),
        ("STANDALONE", {"draft_sampling": True, "verify": "rejection"}, GraphWeighedHybridRound),
        ("EAGLE3", {"draft_sampling": True, "verify": "match"}, "drafts are sampled"),
        ("EAGLE3", {"verify": "relaxed"}, GraphRelaxedHybridRound),
        ("EAGLE3", {"verify": "relaxed", "simulate_accept_length": 2.5}, GraphHybridRound),
        ("EAGLE3", {"eagle_topk": 2, "verify": "target_only"}, GraphWeighedHybridTreeRound),
        ("EAGLE3", {"suffix_branches": 2, "verify": "target_only"}, GraphWeighedHybridTreeRound),
        ("EAGLE3", {"eagle_topk": 2, "draft_sampling": True}, GraphWeighedHybridTreeRound),
        (
            "EAGLE3",
            {"eagle_topk": 2, "draft_sampling": True, "verify": "match"},
            "drafts are sampled",
        ),
        ("EAGLE3", {"eagle_topk": 2, "verify": "relaxed"}, GraphRelaxedHybridTreeRound),
    ],
)
def test_which_hybrids_fly(
    name: str, given: dict[str, Any], expected: str | type[GraphRound], folders: Folders
) -> None:
    folder, spec = folders[name]
    made = made_of(make(folder, hybrid(spec, **given)))
    if isinstance(expected, str):
        assert isinstance(made, str)
        assert made.startswith(expected)
    else:
        assert type(made) is expected


@ON_CPU
def test_hybrids_of_text_alone_fly_as_text_does(target: Path) -> None:
    spec = hybrid(SpecConfig(algorithm="NGRAM"))
    drafter = make(target, spec).engine.drafter
    found = _row_drafter(drafter, 4, CPU, chooses=True)
    assert found is not None
    assert isinstance(found[0], HostDrafts)


@ON_CPU
def test_of_the_text_suffixes_are_asked_alone(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the waits of plain rounds, and ahead."""
    folder, spec = folders["EAGLE3"]
    llm = make(folder, hybrid(spec))
    fly(llm, monkeypatch)
    flights, drafter = llm.engine.flights, llm.engine.drafter
    assert isinstance(drafter, HybridDrafter)
    assert flights is not None
    assert flights._study is not None
    assert flights._ahead is not None
    readers: list[Any] = [flights._reader, flights._study.drafter, flights._ahead.drafter]
    assert all(one is drafter.suffix for one in readers)
    assert flights._ahead._cuts, "whether a text overrides must be as on the host"
    asked: Callable[..., DraftProposal] = drafter.suffix.draft_ahead
    calls: list[int] = []

    def ahead(reqs: Any, *given: Any) -> DraftProposal:
        calls.append(len(reqs))
        return asked(reqs, *given)

    monkeypatch.setattr(drafter.suffix, "draft_ahead", ahead)
    monkeypatch.setattr(drafter, "draft", lambda batch: pytest.fail("the model is on the device"))
    llm.generate(["x", "0101" * 9], LONG)
    assert len(calls) > 10


class Read(SuffixDrafter):
    """Never asked."""

    def __init__(self) -> None:
        self.max_nodes = 6


def test_drafts_past_an_end_are_not_counted_and_padding_that_stood_is() -> None:
    inner: RowDrafter = Model()
    device = ScriptedRound(HybridDrafts(inner, Read(), 4, 5, CPU), steps=(0, 3, 5), num_nodes=6)
    policy = SimpleNamespace(left_after=lambda reqs, said: [req.left for req in reqs])
    given: Any = device, None, SimpleNamespace(policy=policy), None, False
    flights, reqs = Flights(*given), [request() for _ in range(3)]
    for req, left in zip(reqs, (2, 9, 9), strict=True):
        req.left = left
    flight: Any = SimpleNamespace(reqs=reqs, num_drafted=[3, 3, 5])
    useful = flights._useful_levels(flight)
    assert useful == [1, 3, 5]
    result = VerifyResult([], [3, 4, 0], [3, 4, 5], None)
    assert flights._counted(flight, useful, result) == [1, 4, 5]
