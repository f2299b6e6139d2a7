"""Requests with a grammar fly among the others: every token is what it is without graphs, and only
the last part of a round waits for the host's masks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.engine.adaptive.choose import DrafterPause
from specengine.engine.adaptive.costs import StepCosts
from specengine.engine.adaptive.state import AdaptiveSteps
from specengine.engine.flights import Flights
from specengine.engine.graph_round import GraphRound
from tests.engine.flying_world import let_fly

PROMPTS = ["The quick brown fox", "x", '{"a": [1, 22]} {"a": [1, 22]} ', "0123456789" * 4]
FREE = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 4}},
    "required": ["a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ ]?"},
}
RULED = [
    replace(FREE, grammar=GrammarSpec.json_schema(SCHEMA)),
    replace(FREE, grammar=GrammarSpec.regex("(ab|cd|[xyz]){12,30}"), temperature=0.9, seed=3),
    replace(FREE, grammar=GrammarSpec.regex("[a-f]{8}"), min_tokens=4, logprobs=2),
    replace(FREE, grammar=GrammarSpec.choice(["yes", "no", "yes, but"]), presence_penalty=0.5),
]
SAMPLED = replace(FREE, temperature=0.8, top_p=0.9, seed=7)
BATCHES = {
    "one of four": [FREE, SAMPLED, RULED[0], FREE],
    "two of four": [RULED[1], FREE, RULED[0], SAMPLED],
    "all": RULED,
    "logprobs": [FREE, replace(SAMPLED, logprobs=1), RULED[2], RULED[1]],
    "edits": [RULED[3], replace(FREE, logit_bias={9: -3.0}), RULED[0], FREE],
}
NAMES = ["plain", "EAGLE", "EAGLE3", "a tree", "NGRAM", "a tree of text"]
ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="graphs are tested where there is a GPU"
)


@pytest.fixture(scope="module")
def specs(drafters: dict[str, str]) -> dict[str, SpecConfig | None]:
    eagle = SpecConfig(
        algorithm="EAGLE", adaptive=False, draft_model_path=drafters["EAGLE"], num_steps=3
    )
    eagle3 = drafters["EAGLE3"]
    return {
        "plain": None,
        "EAGLE": eagle,
        "EAGLE3": replace(eagle, algorithm="EAGLE3", draft_model_path=eagle3),
        "a tree": replace(
            eagle,
            algorithm="EAGLE3",
            draft_model_path=eagle3,
            eagle_topk=3,
            num_draft_tokens=9,
        ),
        "NGRAM": SpecConfig(algorithm="NGRAM", adaptive=False, ngram_min_match=1),
        "a tree of text": SpecConfig(
            algorithm="NGRAM", adaptive=False, ngram_min_match=1, ngram_branches=3
        ),
    }


def make(target: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    return LLM(str(target), spec, **{"dtype": "float32", "max_total_tokens": 2048, **flags})


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    found = llm.generate(PROMPTS[: len(params)], params)
    llm.engine.scheduler.check_invariant()
    for one, asked in zip(found, params, strict=True):
        if asked.logprobs is not None:
            told = one.completions[0].logprobs
            assert [each.token for each in told] == one.token_ids
    return [one.token_ids for one in found]


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[list[int]]]:
    llm = make(target, None, disable_cuda_graph=True)
    return {name: tokens(llm, params) for name, params in BATCHES.items()}


@ON_CPU
@pytest.mark.parametrize(
    ("name", "overlaps"),
    [
        *(
            pytest.param(name, True, marks=pytest.mark.slow if name == "EAGLE" else ())
            for name in NAMES
        ),
        ("EAGLE3", False),
    ],
)
def test_grammars_fly(
    name: str,
    overlaps: bool,
    target: Path,
    specs: dict[str, SpecConfig | None],
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(target, specs[name])
    flying = let_fly(llm, monkeypatch, overlaps)
    for batch, params in BATCHES.items():
        assert tokens(llm, params) == expected[batch], batch
    counters = dict(flying.counters)
    assert counters.pop("replays") > 20
    assert counters.keys() == {"captures"}, "nothing took the host's round"
    if name != "plain":
        assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 20


class Diary:
    """What an engine does, in order."""

    def __init__(self, llm: LLM, flying: GraphRound, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        for owner, name in (
            (flying, "launch"),
            (flying, "follow"),
            (flying, "land"),
            (llm.engine.scheduler, "commit_round"),
            (flying.masks, "send"),
        ):
            self._watch(owner, name, monkeypatch)

    def _watch(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        method = getattr(owner, name)

        def watched(*given: Any) -> Any:
            self.lines.append(name)
            return method(*given)

        monkeypatch.setattr(owner, name, watched)


@ON_CPU
@pytest.mark.parametrize("name", ["plain", "EAGLE3"])
def test_a_neighbour_with_a_grammar_stops_nobody(
    name: str, target: Path, specs: dict[str, SpecConfig | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round is launched before the last is read, with its masks to come."""
    llm = make(target, specs[name])
    flying = let_fly(llm, monkeypatch)
    regex = replace(FREE, grammar=GrammarSpec.regex("[a-z]{60}"))
    tokens(llm, [FREE, FREE, regex])  # captures
    diary = Diary(llm, flying, monkeypatch)
    tokens(llm, [FREE, FREE, FREE])
    free = diary.lines.copy()
    tokens(llm, [FREE, FREE, regex])
    ruled = diary.lines[len(free) :]
    round_ = ["follow", "land", "commit_round"]
    assert free[:7] == ["launch", *round_, *round_]
    assert ruled[:10] == ["launch", "send", *round_, "send", *round_, "send"]
    assert free.count("launch") == 1
    assert ruled.count("launch") <= 2, "smaller batches wait for their graphs"
    assert ruled.count("follow") >= free.count("follow") > 5


@ON_CPU
def test_rounds_that_the_drafter_sleeps_through(
    target: Path,
    specs: dict[str, SpecConfig | None],
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(target, specs["EAGLE3"])
    flying = let_fly(llm, monkeypatch)
    flying.may_sleep = True
    flying.steps = [0, 3]
    dear = AdaptiveSteps([0, 3], StepCosts({4: {0: 1e-3, 3: 1.0}}))
    parts = llm.engine.parts
    llm.engine.flights = Flights(flying, parts.drafter, parts.scheduler, dear, overlaps=True)
    llm.engine.flights.pause = DrafterPause(paused=3, active=2)
    for batch in ("one of four", "all"):
        assert tokens(llm, BATCHES[batch]) == expected[batch]
    assert {form.asleep for form in flying.captured if form.choosing.masks} == {True, False}
    assert max(parts.drafter.first_keys) > 8  # type: ignore[attr-defined]


@ON_CPU
@pytest.mark.parametrize("gone", [0, 2], ids=["a free one", "a ruled one"])
def test_requests_that_leave_in_the_air(
    gone: int,
    target: Path,
    specs: dict[str, SpecConfig | None],
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(target, specs["EAGLE3"])
    let_fly(llm, monkeypatch)
    engine = llm.engine
    for i, (prompt, wish) in enumerate(zip(PROMPTS, BATCHES["one of four"], strict=True)):
        engine.add_request(str(i), llm.tokenizer.encode(prompt), wish)
    for _ in range(4):
        engine.step()
    assert engine.flights is not None
    assert engine.flights.in_the_air
    engine.abort(str(gone))
    found = {}
    while engine.has_work:
        for output in engine.step():
            found[output.rid] = output.token_ids
    for i, ids in enumerate(expected["one of four"]):
        assert i == gone or found[str(i)] == ids
    engine.scheduler.check_invariant()


@ON_CPU
def test_memory_that_runs_short(
    target: Path, specs: dict[str, SpecConfig | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [*BATCHES["one of four"], *BATCHES["two of four"]]
    params = [replace(one, max_tokens=60) for one in params]
    prompts = [PROMPTS[i % 4] for i in range(len(params))]
    plain = make(target, None).generate(prompts, params)
    llm = make(target, specs["EAGLE3"], max_total_tokens=170, max_running_requests=4)
    flying = let_fly(llm, monkeypatch)
    found = llm.generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert llm.engine.scheduler.num_retractions > 0
    assert flying.counters["replays"] > 0
    llm.engine.scheduler.check_invariant()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
    @pytest.mark.parametrize("name", NAMES)
    def test_grammars_fly(
        self,
        name: str,
        overlap: bool,
        target: Path,
        specs: dict[str, SpecConfig | None],
        expected: dict[str, list[list[int]]],
    ) -> None:
        flags = {"disable_overlap_schedule": not overlap}
        llm = make(target, specs[name], **flags)
        for _ in range(2):  # with captures, and without
            for batch, params in BATCHES.items():
                assert tokens(llm, params) == expected[batch], batch
        stats = llm.engine.stats().graphs["round"]
        assert stats.replays > 40
        assert not stats.fallbacks

    def test_depths_that_change(
        self,
        target: Path,
        specs: dict[str, SpecConfig | None],
        expected: dict[str, list[list[int]]],
    ) -> None:
        spec = specs["EAGLE3"]
        assert spec is not None
        llm = make(target, replace(spec, adaptive=True))
        for batch, params in (*BATCHES.items(), *BATCHES.items()):
            assert tokens(llm, params) == expected[batch], batch
