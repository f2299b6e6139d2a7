"""Requests with a grammar in rounds on the device: every token is what it is on the host,
and only the last part of a round waits for the masks that the host makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.core.sampling import SpecControl
from specengine.engine.adaptive.choose import DrafterPause
from specengine.engine.adaptive.costs import StepCosts
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.pipeline import RoundPipeline
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import InFlightRound
from tests.halves import slow_but
from tests.support.device_rounds import make_on_device, run_on_device
from tests.support.rounds import ON_CPU, WHERE, make, summary

PROMPTS = ["The quick brown fox", "x", '{"a": [1, 22]} {"a": [1, 22]} ', "0123456789" * 4]
FREE = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 4}},
    "required": ["a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ ]?"},
}
CONSTRAINED = [
    replace(FREE, grammar=GrammarSpec.json_schema(SCHEMA)),
    replace(FREE, grammar=GrammarSpec.regex("(ab|cd|[xyz]){12,30}"), temperature=0.9, seed=3),
    replace(FREE, grammar=GrammarSpec.regex("[a-f]{8}"), min_tokens=4, logprobs=2),
    replace(FREE, grammar=GrammarSpec.choice(["yes", "no", "yes, but"]), presence_penalty=0.5),
]
SAMPLED = replace(FREE, temperature=0.8, top_p=0.9, seed=7)
BATCHES = {
    "one of four": [FREE, SAMPLED, CONSTRAINED[0], FREE],
    "two of four": [CONSTRAINED[1], FREE, CONSTRAINED[0], SAMPLED],
    "all": CONSTRAINED,
    "logprobs": [FREE, replace(SAMPLED, logprobs=1), CONSTRAINED[2], CONSTRAINED[1]],
    "edits": [CONSTRAINED[3], replace(FREE, logit_bias={9: -3.0}), CONSTRAINED[0], FREE],
}
NAMES = ["plain", "EAGLE", "EAGLE3", "a tree", "NGRAM", "a tree of text"]
COUNTED: dict[str, Any] = {"max_tokens": 99, "ignore_eos": False}


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


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    found = llm.generate(PROMPTS[: len(params)], params)
    llm.engine.scheduler.check_invariant()
    for one, asked in zip(found, params, strict=True):
        if asked.logprobs is not None:
            logprobs = one.completions[0].logprobs
            assert [each.token for each in logprobs] == one.token_ids
    return [one.token_ids for one in found]


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[list[int]]]:
    llm = make(target, None, disable_cuda_graph=True)
    return {name: tokens(llm, params) for name, params in BATCHES.items()}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("name", "overlaps"),
    slow_but(
        [("a tree", True), ("NGRAM", True), ("EAGLE3", False)],
        [*((name, True) for name in NAMES), ("EAGLE3", False)],
    ),
)
def test_grammar_rounds_emit_what_host_rounds_do(
    name: str,
    overlaps: bool,
    where: str,
    target: Path,
    specs: dict[str, SpecConfig | None],
    expected: dict[str, list[list[int]]],
) -> None:
    llm, rounds = make_on_device(where, target, specs[name], overlaps)
    for _ in range(1 if where == "cpu" else 2):  # with captures, and without
        for batch, params in BATCHES.items():
            assert tokens(llm, params) == expected[batch], batch
    counters = dict(rounds.counters)
    assert counters.pop("replays") > 20
    assert counters.keys() == {"captures"}, "no round ran on the host"
    if name != "plain":
        assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 20


LETTERS, DIGITS = GrammarSpec.regex("[a-z ]{9,20}"), GrammarSpec.regex("[0-5]{16,20}")
# The grammars end requests: near other ends, rounds on the device draft more.
ENDED = [
    replace(SAMPLED, grammar=LETTERS, **COUNTED),
    replace(FREE, grammar=DIGITS, **COUNTED),
    replace(SAMPLED, grammar=DIGITS, speculative=SpecControl(num_steps=2), **COUNTED),
    FREE,
]


@ON_CPU
@pytest.mark.parametrize(
    "name", slow_but(["EAGLE3", "a tree of text"], ["EAGLE3", "a tree", "NGRAM", "a tree of text"])
)
def test_drafts_that_a_grammar_cuts_are_not_counted(
    name: str, target: Path, specs: dict[str, SpecConfig | None]
) -> None:
    """As on the host."""
    host, llm = make(target, specs[name]), make(target, specs[name])
    rounds = run_on_device(llm)
    prompts = ["The quick brown fox", "0123456789" * 4, "0123012301230123", "x"]
    for count in (4, 1):
        given = prompts[:count], ENDED[:count]
        found, expected = llm.generate(*given), host.generate(*given)
        assert summary(found[:3]) == summary(expected[:3])
    assert rounds.counters.keys() == {"captures", "replays"}
    assert llm.engine.scheduler.spec_totals.num_draft_tokens > 20


def test_drafts_deeper_than_a_request_wants_are_not_counted() -> None:
    fields: list[Any] = [None] * 6
    in_flight = InFlightRound(*fields, {1: [1, 1, 2, 3]})
    assert in_flight.kept([9, 9, 9], [2, 2, 2]) == [9, 3, 9]
    assert in_flight.kept([9, 2, 9], [3, 3, 3]) == [9, 2, 9]


class Calls:
    """What an engine calls, in order."""

    def __init__(self, llm: LLM, rounds: RoundExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for owner, name in (
            (rounds, "launch"),
            (rounds, "follow"),
            (rounds, "collect"),
            (llm.engine.scheduler, "commit_round"),
            (rounds.round.masks, "send"),
        ):
            self._watch(owner, name, monkeypatch)

    def _watch(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        method = getattr(owner, name)

        def watched(*given: Any) -> Any:
            self.names.append(name)
            return method(*given)

        monkeypatch.setattr(owner, name, watched)


@ON_CPU
@pytest.mark.parametrize("name", ["plain", "EAGLE3"])
def test_rounds_follow_at_once_beside_a_grammar(
    name: str, target: Path, specs: dict[str, SpecConfig | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round is launched before the last is read, with its masks to come."""
    llm = make(target, specs[name])
    rounds = run_on_device(llm)
    long = replace(FREE, max_tokens=24)
    regex = replace(long, grammar=GrammarSpec.regex("[a-z]{60}"))
    tokens(llm, [long, long, regex])  # captures
    calls = Calls(llm, rounds, monkeypatch)
    tokens(llm, [long, long, long])
    free = calls.names.copy()
    tokens(llm, [long, long, regex])
    constrained = calls.names[len(free) :]
    round_ = ["follow", "collect", "commit_round"]
    assert free[:7] == ["launch", *round_, *round_]
    assert constrained[:10] == ["launch", "send", *round_, "send", *round_, "send"]
    assert free.count("launch") == 1
    assert constrained.count("launch") <= 2, "smaller batches wait for their graphs"
    assert constrained.count("follow") >= free.count("follow") > 5


@ON_CPU
def test_rounds_of_a_paused_drafter_serve_grammars(
    target: Path,
    specs: dict[str, SpecConfig | None],
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(target, specs["EAGLE3"])
    rounds = run_on_device(llm)
    rounds.may_pause = True
    rounds.steps = [0, 3]
    dear = DepthChooser([0, 3], StepCosts({4: {0: 1e-3, 3: 1.0}}))
    parts = llm.engine.parts
    llm.engine.pipeline = RoundPipeline(rounds, parts.drafter, parts.scheduler, dear, overlaps=True)
    llm.engine.pipeline.depths.pause = DrafterPause(paused=3, active=2)
    for batch in ("one of four", "all"):
        assert tokens(llm, BATCHES[batch]) == expected[batch]
    assert {key.paused for key in rounds.captured if key.sampling.masks} == {True, False}
    assert max(parts.drafter.first_keys) > 8  # type: ignore[attr-defined]


@ON_CPU
@pytest.mark.parametrize("gone", [0, 2], ids=["a free one", "a constrained one"])
def test_requests_that_leave_has_in_flight(
    gone: int,
    target: Path,
    specs: dict[str, SpecConfig | None],
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(target, specs["EAGLE3"])
    run_on_device(llm)
    engine = llm.engine
    for i, (prompt, one) in enumerate(zip(PROMPTS, BATCHES["one of four"], strict=True)):
        engine.add_request(str(i), llm.tokenizer.encode(prompt), one)
    for _ in range(4):
        engine.step()
    assert engine.pipeline is not None
    assert engine.pipeline.has_in_flight
    engine.abort(str(gone))
    found = {}
    while engine.has_work:
        for output in engine.step():
            found[output.rid] = output.token_ids
    for i, ids in enumerate(expected["one of four"]):
        assert i == gone or found[str(i)] == ids
    engine.scheduler.check_invariant()


@ON_CPU
def test_memory_that_runs_short_changes_no_token_of_grammars(
    target: Path, specs: dict[str, SpecConfig | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [*BATCHES["one of four"], *BATCHES["two of four"]]
    params = [replace(one, max_tokens=60) for one in params]
    prompts = [PROMPTS[i % 4] for i in range(len(params))]
    plain = make(target, None).generate(prompts, params)
    llm = make(target, specs["EAGLE3"], max_total_tokens=170, max_running_requests=4)
    rounds = run_on_device(llm)
    found = llm.generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert llm.engine.scheduler.num_retractions > 0
    assert rounds.counters["replays"] > 0
    llm.engine.scheduler.check_invariant()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_chosen_depths_change_no_token_of_grammars(
    target: Path,
    specs: dict[str, SpecConfig | None],
    expected: dict[str, list[list[int]]],
) -> None:
    spec = specs["EAGLE3"]
    assert spec is not None
    llm = make(target, replace(spec, adaptive=True))
    for batch, params in (*BATCHES.items(), *BATCHES.items()):
        assert tokens(llm, params) == expected[batch], batch
