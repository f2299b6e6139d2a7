"""Trees of a model beside those of text in rounds on the device: tokens are plain decoding's, and
what is drafted and accepted is what it is in rounds of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from specengine import LLM
from specengine.core.request import Req
from specengine.draft.hybrid import HybridDrafter
from specengine.draft.standalone.worker import StandaloneWorker
from specengine.engine.graph_hybrid import GraphHybridTreeRound
from tests.engine.flying_world import come_and_go
from tests.engine.hybrid_tree_world import (
    CASES,
    NODES,
    PARAMS,
    Folders,
    Prompts,
    Rounds,
    check,
    flying_of,
    same_rounds,
    trees,
)
from tests.engine.hybrid_world import LONG, make
from tests.engine.test_graph_hybrid import WISHES
from tests.engine.test_graph_weighed import ON_CPU, fallbacks
from tests.engine.test_standalone_kv import kv_of


@ON_CPU
@pytest.mark.parametrize("params", [pytest.param("greedy", marks=pytest.mark.slow), "mixed"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_tokens_and_rounds_are_those_of_the_host(
    name: str,
    kind: str,
    params: str,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, spec = folders[name]
    host, llm, plain = (make(folder, one and trees(one, kind)) for one in (spec, spec, None))
    flying, sources = flying_of(llm, monkeypatch)
    its, mine = Rounds(), Rounds()
    mine.watch(llm, monkeypatch)
    host.engine.round.recorders.append(its)
    for count in (4, 1):  # with captures, and on prefix hits
        given = torn[folder][:count], PARAMS[params][:count]
        found, _, same = (one.generate(*given) for one in (llm, host, plain))
        assert [one.token_ids for one in found] == [one.token_ids for one in same]
        assert same_rounds(mine, its, found) > 3 * count
        mine.of.clear()
        its.of.clear()
        llm.engine.scheduler.check_invariant()
    assert not fallbacks(flying)
    if params == "greedy":
        assert sources.rounds.keys() == {"model", "both", "text"}
        assert min(sources.accepted["model"], sources.accepted["text"]) > 20
        assert {form.num_steps for form in sources.forms} == {3, NODES - 1}


@ON_CPU
@pytest.mark.parametrize("corpus", [False, True], ids=["alone", "shared corpus"])
def test_rounds_are_the_same_without_overlap(
    corpus: bool, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, spec = folders["EAGLE3"]
    given = {"suffix_shared_corpus": corpus, "suffix_corpus_tokens": 500}
    host, llm = (make(folder, trees(spec, "both", **given if corpus else {})) for _ in range(2))
    flying, sources = flying_of(llm, monkeypatch, overlaps=corpus)
    assert llm.engine.flights is not None
    assert llm.engine.flights._ahead is None
    its, mine = Rounds(), Rounds()
    mine.watch(llm, monkeypatch)
    host.engine.round.recorders.append(its)
    found, expected = (one.generate(torn[folder][:3], LONG) for one in (llm, host))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert same_rounds(mine, its, found) > 9
    assert not fallbacks(flying)
    assert sources.rounds["both"] > 1


@ON_CPU
@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize(("name", "kind"), [("EAGLE3", "both"), ("STANDALONE", "text")])
def test_wishes_fly(
    name: str,
    kind: str,
    wish: str,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, spec = folders[name]
    llm = make(folder, trees(spec, kind))
    flying, sources = flying_of(llm, monkeypatch)
    check(llm, folder, torn[folder], WISHES[wish])
    assert not fallbacks(flying)
    assert min(sources.accepted["model"], sources.accepted["text"]) > 5


@ON_CPU
@pytest.mark.parametrize(
    ("name", "kind", "min_match"),
    [("EAGLE3", "both", 16), ("STANDALONE", "model", 3), ("MTP layers", "text", 3)],
)
def test_requests_come_and_go_between_both_kinds_of_rounds(
    name: str,
    kind: str,
    min_match: int,
    folders: Folders,
    torn: Prompts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """min_match: with long ones, some rounds of the model follow unseen."""
    folder, spec = folders[name]
    spec = trees(spec, kind, hybrid_suffix_min_match=min_match)
    llm = make(folder, spec, max_running_requests=4, max_total_tokens=4096)
    flying, sources = flying_of(llm, monkeypatch)
    every = [*PARAMS["greedy"], *PARAMS["mixed"], *WISHES["grammars"]]
    come_and_go(make(folder, None), llm, torn[folder], every, monkeypatch)
    assert flying.counters["replays"] > 40
    assert not fallbacks(flying)
    assert sources.rounds.keys() >= {"model", "both"}


@ON_CPU
@pytest.mark.parametrize(("kind", "nodes"), [("model", 5), ("text", NODES)])
def test_whatever_rounds_were_a_smaller_model_has_its_kv(
    kind: str, nodes: int, folders: Folders, torn: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but that of the last two tokens: what a prompt of the same text would leave. nodes: where
    all of a short draft stands, its last two tokens have not been run."""
    folder, spec = folders["STANDALONE"]
    llm, host = make(folder, trees(spec, kind, nodes)), make(folder, spec)
    _, sources = flying_of(llm, monkeypatch, overlaps=False)
    for n in (0, 2):
        llm.engine.add_request(str(n), torn[folder][n][-100:], replace(LONG, max_tokens=150))
    reqs = [*llm.engine.choices]
    for _ in range(24):
        for _ in ("launched", "landed"):
            llm.engine.step()
        if any(req.is_finished for req in reqs):
            break
        texts = [req.token_ids for req in reqs]
        for n, text in enumerate(texts):
            host.engine.add_request(f"{len(text)} {n}", text, replace(LONG, max_tokens=9))
        host.engine.step()
        for req, other in zip(reqs, [*host.engine.choices], strict=True):
            compare_kv(llm, req, host, other)
            host.engine.abort(other.rid.split("#")[0])
        host.engine.step()
    assert sources.rounds.keys() == {"model", "both", "text"}


def compare_kv(llm: LLM, req: Req, host: LLM, other: Req) -> None:
    drafter = cast(HybridDrafter, llm.engine.drafter)
    assert isinstance(drafter.inner, StandaloneWorker)
    pairs = zip(
        kv_of(drafter.inner, [req], req.kv_len - 1),
        kv_of(cast(StandaloneWorker, host.engine.drafter), [other], req.kv_len - 1),
        strict=True,
    )
    for one, its in pairs:
        torch.testing.assert_close(one, its, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize(("name", "kind"), CASES)
    def test_graphs_change_nothing(
        self, name: str, kind: str, overlap: bool, folders: Folders, torn: Prompts
    ) -> None:
        folder, spec = folders[name]
        more = {"disable_cuda_graph": False, "cuda_graph_bs": (1, 2, 4)}
        more |= {"disable_overlap_schedule": not overlap}
        llm = make(folder, trees(spec, kind), disable_radix_cache=True, **more)
        assert llm.engine.flights is not None
        flying = llm.engine.flights.graph_round
        assert isinstance(flying, GraphHybridTreeRound)
        for params in (*PARAMS.values(), *WISHES.values()):
            for count in (4, 1, 2):
                check(llm, folder, torn[folder][:count], params[:count])
        assert not fallbacks(flying)
        assert llm.engine.stats().graphs["round"].replays > 60
        assert {form.model_steps for form in flying.captured} == {None, 3, 0}

    @pytest.mark.parametrize("kind", ["model", "both", "text"])
    @pytest.mark.parametrize("name", ["EAGLE3", "STANDALONE"])
    def test_requests_come_and_go(
        self,
        name: str,
        kind: str,
        folders: Folders,
        torn: Prompts,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        folder, spec = folders[name]
        flying = {"disable_cuda_graph": False, "cuda_graph_bs": (1, 2, 4)}
        flying |= {"max_running_requests": 4, "max_total_tokens": 4096}
        llm = make(folder, trees(spec, kind, adaptive=True), **flying)
        every = [one for params in PARAMS.values() for one in params] + WISHES["grammars"]
        come_and_go(make(folder, None), llm, torn[folder], every * 2, monkeypatch)
        assert llm.engine.flights is not None
        assert not fallbacks(llm.engine.flights.graph_round)
