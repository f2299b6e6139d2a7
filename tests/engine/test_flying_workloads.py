"""Random workloads on rounds that fly: whatever happens around a request, it says what it would say
alone, every KV slot is accounted for after every step, and counts add up."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig, SpecControl
from specengine.core.request import Req
from specengine.draft.standalone.worker import StandaloneWorker
from specengine.engine.draft_depth import depths_within
from specengine.engine.graph_round import GraphRound
from specengine.engine.host_drafts import HostDrafter
from specengine.engine.outputs import RequestOutput
from specengine.engine.row_choices import rows_of
from tests.engine.flying_world import let_fly
from tests.engine.test_depth_in_results import ON_CPU, Steered
from tests.engine.test_text_study import Behind

CASES: dict[str, dict[str, Any]] = {
    "NGRAM": {"page_size": 4, "max_total_tokens": 160, "chunked_prefill_size": 16},
    "SUFFIX": {"page_size": 1, "max_total_tokens": 208, "disable_radix_cache": True},
    "hybrid": {"page_size": 16, "max_total_tokens": 208, "chunked_prefill_size": 16},
    "STANDALONE": {"page_size": 1, "max_total_tokens": 160, "chunked_prefill_size": 64},
    "EAGLE3": {"page_size": 4, "max_total_tokens": 160, "chunked_prefill_size": -1},
    "NGRAM tree": {"page_size": 4, "max_total_tokens": 208, "chunked_prefill_size": 16},
    "SUFFIX tree": {"page_size": 1, "max_total_tokens": 240, "disable_radix_cache": True},
    "STANDALONE tree": {"page_size": 4, "max_total_tokens": 320, "chunked_prefill_size": 16},
    "tree": {"page_size": 16, "max_total_tokens": 320, "chunked_prefill_size": 16},
    "EAGLE3 hybrid": {"page_size": 4, "max_total_tokens": 208, "chunked_prefill_size": 16},
    "STANDALONE hybrid": {"page_size": 1, "max_total_tokens": 208, "chunked_prefill_size": 64},
    "EAGLE3 hybrid tree": {"page_size": 4, "max_total_tokens": 320, "chunked_prefill_size": 16},
    "STANDALONE hybrid tree": {"page_size": 1, "max_total_tokens": 320, "chunked_prefill_size": 64},
}
FLAGS: dict[str, Any] = {"dtype": "float32", "max_running_requests": 8}
RULED = GrammarSpec.regex("(a|b|0|1){2,9}")
DEPTHS = [SpecControl(), SpecControl(), SpecControl(num_steps=1), SpecControl(enabled=False)]


def spec_of(name: str, target: Path, drafters: dict[str, str]) -> SpecConfig:
    if name in ("NGRAM tree", "SUFFIX tree"):
        algorithm, branches = name.split()[0], f"{name.split()[0].lower()}_branches"
        least: dict[str, Any] = {"ngram_min_match": 1} if algorithm == "NGRAM" else {}
        return SpecConfig(algorithm=algorithm, num_draft_tokens=8, **least, **{branches: 2})
    if name == "SUFFIX":
        return SpecConfig(algorithm=name, num_draft_tokens=4)
    if name in ("NGRAM", "hybrid"):
        more: dict[str, Any] = {"ngram_min_match": 1, "hybrid_suffix": name == "hybrid"}
        return SpecConfig(algorithm="NGRAM", num_draft_tokens=4, **more)
    is_tree = name.endswith("tree")
    shape: dict[str, Any] = {"eagle_topk": 3, "num_draft_tokens": 9} if is_tree else {}
    algorithm = "EAGLE3" if name == "tree" else name.split()[0]
    if "hybrid" in name:
        least = {"hybrid_suffix_min_match": 6 if algorithm == "EAGLE3" else 3}
        shape = {"hybrid_suffix": True, "num_draft_tokens": 8, **least} | shape
    itself = algorithm == "STANDALONE" and not is_tree
    draft = str(target) if itself else drafters[algorithm]
    return SpecConfig(
        algorithm=algorithm, adaptive=False, draft_model_path=draft, num_steps=3, **shape
    )


@dataclass
class Workload:
    llm: LLM
    random: random.Random
    reqs: dict[Req, tuple[str, SamplingParams]] = field(default_factory=dict)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def arrive(self, stem: str) -> None:
        """Some twice, to end together."""
        draw = self.random
        prompt = stem[: draw.choice([5, 33, 64, 70])] + "ab01"[: draw.randint(0, 4)]
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 30),
            temperature=draw.choice([0.0, 0.0, 0.8]),
            seed=draw.randrange(99),
            ignore_eos=draw.random() < 0.7,
            stop=draw.choice([(), (), ("a",), ("01",)]),
            logprobs=draw.choice([None, None, 0]),
            frequency_penalty=draw.choice([0.0, 0.0, 0.0, 0.5]),
            min_tokens=draw.choice([0, 0, 0, 4]),
            grammar=draw.choice([None, None, None, RULED]),
            speculative=draw.choice(DEPTHS),
        )
        for _ in range(draw.choice([1, 1, 2])):
            rid = str(len(self.reqs))
            self.llm.engine.add_request(rid, self.llm.tokenizer.encode(prompt), sampling)
            req = next(req for req, one in self.llm.engine.choices.items() if one.rid == rid)
            self.reqs[req] = prompt, sampling

    def run(self, arrivals: int) -> None:
        stem = "".join(self.random.choices("ab01", k=70))
        while arrivals or self.llm.engine.has_work:
            if arrivals and self.random.random() < 0.4:
                arrivals -= 1
                self.arrive(stem)
            if self.random.random() < 0.05:
                self.llm.engine.abort(str(self.random.randrange(12)))
            for one in self.llm.engine.step():
                self.outputs[one.rid] = one
            self.llm.engine.scheduler.check_invariant()


def watch_state(flying: GraphRound, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """That the device knows how requests stand where it is not told -> of each launch, whether it
    was not."""
    is_known, untold = flying.known.is_known, list[bool]()

    def asked(reqs: list[Req]) -> bool:
        untold.append(is_known(reqs))
        if untold[-1]:
            rows, state = rows_of(reqs), flying.state
            assert state.lens[rows].tolist() == [req.kv_len for req in reqs]
            assert state.roots[rows].tolist() == [req.last_token for req in reqs]
            assert state.limits[rows].tolist() == depths_within(reqs, flying.steps[-1])
        return untold[-1]

    monkeypatch.setattr(flying.known, "is_known", asked)
    return untold


def let_rounds_differ(llm: LLM, flying: GraphRound, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Some stay on the ground, and not all are drafted from text. As `watch_state`."""
    untold, can_fly, draw = watch_state(flying, monkeypatch), llm.engine._can_fly, random.Random(1)
    monkeypatch.setattr(
        llm.engine, "_can_fly", lambda *given: draw.random() < 0.8 and can_fly(*given)
    )
    assert llm.engine.flights is not None
    if isinstance(flying.drafter, HostDrafter):
        depth = flying.steps[-1]
        llm.engine.flights.depths = Steered(lambda number: 0 if number % 5 < 3 else depth)
    llm.engine.scheduler.admission.demand.share = 0.0
    return untold


def check_workload(llm: LLM, flying: GraphRound, alone: LLM, untold: list[bool]) -> None:
    work, scheduler = Workload(llm, random.Random(0)), llm.engine.scheduler
    work.run(arrivals=12)
    assert flying.counters["replays"] > 10
    assert set(untold) == {False, True}
    for req, (prompt, sampling) in work.reqs.items():
        assert req.finish_reason is not None
        assert sum(req.spec.histogram) == req.spec.num_steps
        if req.finish_reason.kind != "abort":
            (one,) = alone.generate([prompt], replace(sampling, speculative=SpecControl()))
            output = work.outputs[req.rid.split("#")[0]]
            assert (req.output_ids, output.text) == (one.token_ids, one.text)
    totals = scheduler.spec_totals
    assert totals.num_draft_tokens == sum(req.spec.num_draft_tokens for req in work.reqs)
    accepted = sum(req.spec.num_accepted for req in work.reqs)
    assert totals.num_accepted_tokens == sum(totals.accepted_per_pos) == accepted
    assert scheduler.ledger.obtainable == scheduler.ledger.capacity


@ON_CPU
@pytest.mark.parametrize("name", CASES)
def test_random_workload(
    name: str, target: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**FLAGS, "disable_cuda_graph": True}
    llm = LLM(str(target), spec_of(name, target, drafters), **given, **CASES[name])
    alone = LLM(str(target), None, max_total_tokens=2048, **given)
    model = getattr(llm.engine.drafter, "inner", llm.engine.drafter)
    if isinstance(model, StandaloneWorker):
        model.flies = True
    flying = let_fly(llm, monkeypatch, most=8)
    monkeypatch.setattr(torch.cuda, "Event", Behind)
    check_workload(llm, flying, alone, let_rounds_differ(llm, flying, monkeypatch))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_random_workload_on_the_gpu(
    name: str, target: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, graphs = spec_of(name, target, drafters), {"cuda_graph_bs": (1, 2, 4, 8)}
    llm = LLM(str(target), spec, **FLAGS, **graphs, **CASES[name])
    alone = LLM(str(target), None, max_total_tokens=2048, disable_cuda_graph=True, **FLAGS)
    flying = llm.engine.graph_round
    assert flying is not None
    check_workload(llm, flying, alone, let_rounds_differ(llm, flying, monkeypatch))
