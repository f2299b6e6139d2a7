"""Everything that a request may ask for, in one batch of rounds: what comes out is what comes out
without speculation, to the text, the reason of its end and every logprob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from specengine.core.config import EngineConfig, ModelConfig
from specengine.core.grammar import GrammarSpec
from specengine.core.request import TokenLogprob
from specengine.core.sampling import SamplingParams, SpecControl
from specengine.engine.build import load
from specengine.engine.loop import Engine
from specengine.engine.outputs import RequestOutput
from specengine.engine.phases import Phases
from specengine.engine.proof.catalogue import with_models, without_models
from specengine.engine.proof.subjects import CROWDED, FRESH, PLAIN, State, Subject
from specengine.engine.proof.tiny_model import save_tiny_models
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.worker import TpModelWorker

PROMPTS = ["abcabcabcabcabc", "to be or not to be, that is to be or not to be, that is " * 2]
# What output is made of: few tokens are often drafted right.
LETTERS = "ab c"
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "stop strings": {"stop": ("ba", "c ")},
    "stop strings shown": {"stop": ("a b",), "include_stop_str_in_output": True, "min_tokens": 5},
    "stop token": {"stop_token_ids": (67,), "min_tokens": 2},
    "end of text": {"logit_bias": {0: 9.5}, "min_tokens": 7, "ignore_eos": False},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "penalties": {
        "frequency_penalty": 0.9,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logprobs": 0,
    },
    "two choices": {"n": 2, "logprobs": 1},
    "one token": {"max_tokens": 1},
    "no drafts": {"speculative": SpecControl(enabled=False), "logprobs": 1},
    "short drafts": {"speculative": SpecControl(num_steps=1)},
    "schema": {
        "grammar": GrammarSpec.json_schema({"enum": ["abc", "aba", "cab"]}),
        "logprobs": 2,
    },
    "regex": {"grammar": GrammarSpec.regex("(ab|ba| c){3,9}"), "min_tokens": 4},
    "ebnf": {"grammar": GrammarSpec.ebnf('start: ("a" | "b" | start " ")')},
    "choice": {"grammar": GrammarSpec.choice(["a cab", "a bab", "bb"]), "n": 2},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
}
NAMES = [
    "NGRAM chain",
    "NGRAM tree + suffix",
    "SUFFIX tree",
    "STANDALONE chain",
    "STANDALONE tree",
    "EAGLE chain",
    "EAGLE tree",
    "EAGLE3 chain",
    "EAGLE3 tree",
    "MTP chain",
    "MTP tree",
    "MTP, a layer a step: chain + suffix",
]


CASES = [
    *((name, State(CROWDED, 16)) for name in NAMES),
    *((name, State(FRESH)) for name in NAMES[::6]),
]


@dataclass
class World:
    config: EngineConfig
    loaded: LoadedModel
    subjects: dict[str, Subject]
    plain: dict[str, RequestOutput]  # by request and choice

    def engine(self, name: str, state: State) -> Engine:
        return self.subjects[name].build(self.config, state, self.loaded, [])


# Which of prompts and samplings what is asked for meets, by turns.
ALL = ((0, 1, 2, 3),)
ONE = ((0,), (3,), (1,), (2,))
# In make test each option meets one of them in a batch, and each of them over four drafters.
PLACED = [
    pytest.param(*case, places, marks=marks, id=f"{case[0]}-{case[1]}-{len(places[0])}")
    for number, case in enumerate(CASES)
    for turn in [number % len(ONE)]
    for places, marks in (((*ONE[turn:], *ONE[:turn]), []), (ALL, [pytest.mark.slow]))
]


def answers(engine: Engine, state: State, places: Sequence[Sequence[int]]) -> list[RequestOutput]:
    """Answers to prompts, sampled and greedy, whatever is asked for; in one batch."""
    letters = [engine.parts.tokenizer(letter)["input_ids"][0] for letter in LETTERS]
    prompts = [engine.parts.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    for index, options in enumerate(ASKED.values()):
        for place, (prompt, sampling) in enumerate((p, s) for p in prompts for s in SAMPLING):
            if place not in places[index % len(places)]:
                continue
            bias = dict.fromkeys(letters, 9.0) | options.get("logit_bias", {})
            given = {"max_tokens": 20, "ignore_eos": True, "seed": place} | SAMPLING[sampling]
            params = SamplingParams(**given | options | {"logit_bias": bias})
            engine.add_request(f"{index} {place}", prompt, params)
    done: list[RequestOutput] = []
    step = 0
    while engine.has_work:
        state.provoke(engine, step)
        done += [one for one in engine.step() if one.finish_reason is not None]
        step += 1
    engine.scheduler.check_invariant()
    return sorted(done, key=lambda one: (one.rid, one.index))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    models = save_tiny_models(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(model=ModelConfig(model=str(models.target), dtype="float32"))
    loaded = load(config, Phases())
    subjects = {one.name: one for one in [*without_models(), *with_models(models)]}
    fresh = State(FRESH)
    plain = answers(PLAIN.build(config, fresh, loaded, []), fresh, ALL)
    return World(config, loaded, subjects, {f"{one.rid} {one.index}": one for one in plain})


def assert_same_logprobs(
    found: list[TokenLogprob | None], expected: list[TokenLogprob | None]
) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        best = zip(one.top, other.top, strict=True)
        assert all(a == pytest.approx(b, abs=1e-4) for (_, a), (_, b) in best)


@pytest.mark.parametrize(("name", "state", "places"), PLACED)
def test_rounds_give_what_plain_decoding_gives(
    name: str, state: State, places: Sequence[Sequence[int]], world: World
) -> None:
    """Each option with a prompt and a sampling; with every pair of these in make test-all."""
    engine = world.engine(name, state)
    found = answers(engine, state, places)
    assert len({one.rid for one in found}) == len(ASKED) * len(places[0])
    for one in found:
        expected = world.plain[f"{one.rid} {one.index}"]
        about = f"{list(ASKED)[int(one.rid.split()[0])]}, request {one.rid}, choice {one.index}"
        assert (one.rid, one.index) == (expected.rid, expected.index)
        assert one.token_ids == expected.token_ids, about
        assert one.text == expected.text, about
        assert one.finish_reason == expected.finish_reason, about
        assert one.num_prompt_tokens == expected.num_prompt_tokens
        assert_same_logprobs([*one.all_logprobs], [*expected.all_logprobs])
        assert_same_logprobs(one.prompt_logprobs, expected.prompt_logprobs)
        assert len(one.token_ids) == 1 + one.spec.num_rounds + one.spec.num_accepted
    assert engine.stats().spec.num_accepted_tokens > 7 * len(places[0])


def test_the_batch_has_ends_of_every_sort(world: World) -> None:
    kinds = {(one.finish_reason and one.finish_reason.kind) for one in world.plain.values()}
    assert kinds == {"stop", "length"}
    ended = {
        list(ASKED)[int(one.rid.split()[0])]
        for one in world.plain.values()
        if one.finish_reason is not None and one.finish_reason.kind == "stop"
    }
    assert ended >= {"stop strings", "stop token", "end of text", "regex", "choice"}


@pytest.mark.parametrize("name", [name for name in NAMES if "NGRAM" not in name])
def test_drafters_with_a_model_are_workers_on_the_targets_pages(name: str, world: World) -> None:
    engine = world.engine(name, State(FRESH))
    drafter = getattr(engine.drafter, "inner", engine.drafter)
    if "SUFFIX" in name:
        assert not isinstance(drafter, TpModelWorker)
        return
    assert isinstance(drafter, TpModelWorker)
    ours, theirs = drafter.runner.pools, engine.parts.worker.runner.pools
    assert ours.req_to_token_pool is theirs.req_to_token_pool
    assert ours.token_to_kv_pool is not theirs.token_to_kv_pool
