"""Random workloads on rounds on the device: whatever runs around a request, its text is that of
plain decoding, every KV slot is accounted for after every step, and counts add up."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig, SpecControl
from specengine.core.request import Req
from specengine.engine.draft_depth import depths_within
from specengine.engine.outputs import RequestOutput
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.sampling import rows_of
from tests.halves import slow_but
from tests.support.chosen_depths import ChosenDepths
from tests.support.device_rounds import Behind, make_on_device
from tests.support.rounds import WHERE, make

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
# For make test-all.
LIKE_OTHERS = (
    *("SUFFIX", "SUFFIX tree", "hybrid", "EAGLE3 hybrid"),
    *("STANDALONE", "STANDALONE tree", "STANDALONE hybrid", "EAGLE3 hybrid tree"),
)
FLAGS: dict[str, Any] = {"max_running_requests": 8}
GRAMMAR = GrammarSpec.regex("(a|b|0|1){2,9}")
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
            grammar=draw.choice([None, None, None, GRAMMAR]),
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


def watch_state(rounds: RoundExecutor, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Checks that the device has the state of requests wherever the host does not write it ->
    whether it had it, of each launch."""
    is_known, were_known = rounds.host_view.is_known, list[bool]()

    def checked(reqs: list[Req]) -> bool:
        were_known.append(is_known(reqs))
        if were_known[-1]:
            rows, state = rows_of(reqs), rounds.state
            assert state.lens[rows].tolist() == [req.kv_len for req in reqs]
            assert state.roots[rows].tolist() == [req.last_token for req in reqs]
            assert state.max_accepted[rows].tolist() == depths_within(reqs, rounds.steps[-1])
        return were_known[-1]

    monkeypatch.setattr(rounds.host_view, "is_known", checked)
    return were_known


def let_rounds_differ(
    llm: LLM, rounds: RoundExecutor, monkeypatch: pytest.MonkeyPatch
) -> list[bool]:
    """Some run on the host, and lookup drafts for not all. Returns as `watch_state`."""
    were_known, engine, draw = watch_state(rounds, monkeypatch), llm.engine, random.Random(1)
    runs_on_device = engine._runs_on_device
    monkeypatch.setattr(
        engine, "_runs_on_device", lambda *given: draw.random() < 0.8 and runs_on_device(*given)
    )
    assert engine.pipeline is not None
    if rounds.source.host_drafts:
        depth = rounds.steps[-1]
        engine.pipeline.depths.chooser = ChosenDepths(lambda number: 0 if number % 5 < 3 else depth)
    engine.scheduler.admission.demand.share = 0.0
    return were_known


def check_workload(
    llm: LLM, rounds: RoundExecutor, plain: LLM, were_known: list[bool], arrivals: int
) -> None:
    work, scheduler = Workload(llm, random.Random(0)), llm.engine.scheduler
    work.run(arrivals)
    assert rounds.counters["replays"] > 10
    assert set(were_known) == {False, True}
    for req in work.reqs:
        assert req.finish_reason is not None
        assert sum(req.spec.histogram) == req.spec.num_rounds
    whole = [req for req in work.reqs if req.finish_reason and req.finish_reason.kind != "abort"]
    asked = [work.reqs[req] for req in whole]
    params = [replace(sampling, speculative=SpecControl()) for _, sampling in asked]
    prompts = [prompt for prompt, _ in asked]
    for req, one in zip(whole, plain.generate(prompts, params), strict=True):
        output = work.outputs[req.rid.split("#")[0]]
        assert (req.output_ids, output.text) == (one.token_ids, one.text)
    (alone,) = plain.generate(prompts[-1:], params[-1:])
    assert alone.token_ids == whole[-1].output_ids
    totals = scheduler.spec_totals
    assert totals.num_draft_tokens == sum(req.spec.num_draft_tokens for req in work.reqs)
    accepted = sum(req.spec.num_accepted for req in work.reqs)
    assert totals.num_accepted_tokens == sum(totals.accepted_per_pos) == accepted
    assert scheduler.ledger.obtainable == scheduler.ledger.capacity


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", slow_but([one for one in CASES if one not in LIKE_OTHERS], CASES))
def test_random_workload_changes_no_text(
    name: str,
    where: str,
    is_long: bool,
    target: Path,
    drafters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_of(name, target, drafters)
    llm, rounds = make_on_device(where, target, spec, sizes=(1, 2, 4, 8), **FLAGS, **CASES[name])
    plain = make(target, None, disable_cuda_graph=True, **FLAGS)
    if where == "cpu":
        rounds.new_event = Behind
    were_known = let_rounds_differ(llm, rounds, monkeypatch)
    check_workload(llm, rounds, plain, were_known, 12 if is_long else 9)
