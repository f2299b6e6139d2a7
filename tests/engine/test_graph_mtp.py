"""Several MTP layers, one a step, in rounds on the device alone: their drafts are those of the
other round, and tokens are plain decoding's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.draft.loop_graphs import DraftLoops, LoopDrafter, LoopForm
from specengine.draft.mtp.worker import MtpLayersWorker
from specengine.engine.adaptive.cost_table import StepCosts
from specengine.engine.adaptive.naps import Naps
from specengine.engine.adaptive.steps import AdaptiveSteps
from specengine.engine.flights import Flights
from tests.draft.mtp_reading import add_mtp
from tests.support.mtp_targets import TARGETS, predictable
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS, SAMPLED, make

SPEC = SpecConfig(algorithm="MTP", adaptive=False, num_steps=3)
FORMS = ["deepseek", "mimo"]
SEEN_TOO_LITTLE = "a request that the drafter has seen too little of"
ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="graphs are tested where there is a GPU"
)


@pytest.fixture(scope="module")
def folders(
    small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    found = {}
    for form in FORMS:
        found[form] = tmp_path_factory.mktemp(f"graph-mtp-{form}")
        add_mtp(small_models[TARGETS[form]], found[form], form, 3)
        predictable(found[form], form, 3, residue=0.2)
    return found


def flying_worker(llm: LLM) -> MtpLayersWorker:
    drafter = llm.engine.drafter
    assert isinstance(drafter, MtpLayersWorker)
    drafter.flies = True
    return drafter


@ON_CPU
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("params", [[GREEDY] * 3, SAMPLED[:3]], ids=["greedy", "sampled"])
def test_rounds_are_those_of_the_other_form(
    form: str,
    params: list[SamplingParams],
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = make(folders[form], None).generate(PROMPTS, params)
    eager = make(folders[form], SPEC)
    llm = make(folders[form], SPEC)
    flying_worker(llm)
    flying = let_fly(llm, monkeypatch)
    for _ in range(2):  # from an empty cache, and on prefix hits
        found, expected = llm.generate(PROMPTS, params), eager.generate(PROMPTS, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert [one.spec.histogram for one in found] == [one.spec.histogram for one in expected]
        llm.engine.scheduler.check_invariant()
    assert sum(one.spec.num_accepted for one in found) > 8
    assert flying.counters["replays"] > 10
    fallbacks = {name: count for name, count in flying.counters.items() if "fallback" in name}
    assert fallbacks.keys() <= {f"fallback: {SEEN_TOO_LITTLE}"}
    assert sum(fallbacks.values()) <= 3


@ON_CPU
def test_a_request_of_which_little_is_seen_waits(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies before its first row may be another request's."""
    llm = make(folders["mimo"], SPEC)
    worker = flying_worker(llm)
    flying = let_fly(llm, monkeypatch)
    llm.generate(PROMPTS[:1], GREEDY)
    llm.engine.add_request("again", llm.tokenizer.encode(PROMPTS[0]), GREEDY)
    for _ in range(2):  # what is still in the air, and the prefill
        llm.engine.step()
    batch = llm.engine.scheduler.schedule()
    assert batch is not None
    (req,) = batch.reqs
    assert req.prefix_hit_len == len(req.prompt_ids) - 1
    assert not worker.is_ready(req)
    assert not flying.can_run(batch)
    assert flying.counters[f"fallback: {SEEN_TOO_LITTLE}"] == 1
    assert isinstance(worker, LoopDrafter)
    loops = DraftLoops(worker, (1,), True, flying.counters)
    assert loops._form(batch, 3) == SEEN_TOO_LITTLE
    worker._first[req] -= 2
    assert flying.can_run(batch)
    assert loops._form(batch, 3) == LoopForm(1, 3, edited=False)


@ON_CPU
def test_rounds_that_no_layer_looks_at(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(GREEDY, max_tokens=60)
    expected = [one.token_ids for one in make(folders["mimo"], None).generate(PROMPTS, params)]
    llm = make(folders["mimo"], replace(SPEC, adaptive=True))
    flying_worker(llm)
    flying = let_fly(llm, monkeypatch)
    flying.may_sleep, flying.steps = True, [0, 1, 2, 3]
    parts = llm.engine.parts
    for cost_of_none in (1.0, 0.1):
        costs = StepCosts({4: {0: cost_of_none, 1: 1.01, 2: 1.02, 3: 4.0}})
        depths = AdaptiveSteps(flying.steps, costs)
        flights = Flights(flying, parts.drafter, parts.scheduler, depths, overlaps=True)
        flights.naps = Naps(asleep=4, awake=3)
        llm.engine.flights = flights
        assert [one.token_ids for one in llm.generate(PROMPTS, params)] == expected
    forms = {(form.num_steps, form.asleep) for form in flying.captured}
    assert forms >= {(0, False), (0, True), (2, False)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("form", FORMS)
    def test_graphs_change_nothing(
        self, form: str, overlap: bool, folders: dict[str, Path]
    ) -> None:
        eager = make(folders[form], SPEC, disable_cuda_graph=True)
        flags = {"disable_overlap_schedule": not overlap}
        flying = make(folders[form], SPEC, **flags)
        for count in (1, 3, 2):
            expected = eager.generate(PROMPTS[:count], GREEDY)
            found = flying.generate(PROMPTS[:count], GREEDY)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            assert [one.spec.histogram for one in found] == [one.spec.histogram for one in expected]
            flying.engine.scheduler.check_invariant()
        stats = flying.engine.stats().graphs["round"]
        assert stats.replays > 10
        assert stats.fallbacks.keys() <= {SEEN_TOO_LITTLE}

    def test_depths_that_change_do_not_change_tokens(self, folders: dict[str, Path]) -> None:
        eager = make(folders["mimo"], None, disable_cuda_graph=True)
        adaptive = replace(SPEC, adaptive=True)
        flying = make(folders["mimo"], adaptive)
        params = [replace(one, max_tokens=200) for one in (GREEDY, *SAMPLED[:2])]
        for count in (3, 1):
            expected = [one.token_ids for one in eager.generate(PROMPTS[:count], params[:count])]
            found = flying.generate(PROMPTS[:count], params[:count])
            assert [one.token_ids for one in found] == expected
