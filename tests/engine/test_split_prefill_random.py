"""Random traffic with split prompts, on the host's rounds and the device's: whatever comes and
leaves, each answer is what it is without."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.engine.split_build import join_pipeline
from specengine.scheduler.split_policy import PromptQueue, SplitDecision, SplitPrefillPolicy
from tests.engine.test_split_prefill import PretendedStreams, make, prompt, split_of
from tests.support.device_rounds import run_on_device

pytestmark = pytest.mark.slow
CONTEXT = 260


@dataclass
class Asked:
    rid: str
    ids: list[int]
    sampling: SamplingParams
    step: int  # at which it comes
    may_leave: bool


def sampling(draw: random.Random) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": draw.choice([1, 3, 10, 25]), "ignore_eos": True}
    given["priority"] = draw.choice([0, 0, 0, 1, 5])
    given |= {"temperature": 0.0}
    if draw.random() < 0.4:
        given |= {"temperature": 0.8, "seed": draw.randrange(100)}
    if draw.random() < 0.25:
        given |= {"logprobs": 1, "prompt_logprobs": draw.choice([None, 0])}
    return SamplingParams(**given, n=draw.choice([1, 1, 1, 1, 2]))


def traffic(seed: int, count: int = 40) -> list[Asked]:
    draw = random.Random(seed)
    heads = [prompt(1000 + number, 40) for number in range(3)]
    found = []
    for number in range(count):
        head = draw.choice(heads) if draw.random() < 0.4 else []
        ids = head + prompt(seed * 100 + number, draw.choice([4, 10, 30, 60, 90, 150]))
        step, leaves = draw.randrange(90), draw.random() < 0.2
        found.append(Asked(f"q{number}", ids, sampling(draw), step, leaves))
    return sorted(found, key=lambda one: one.step)


def play(llm: LLM, seed: int) -> dict[tuple[str, int], list[int]]:
    """Of those that did not leave, by choice."""
    draw, waiting, engine = random.Random(seed), traffic(seed), llm.engine
    leaving = {one.rid for one in waiting if one.may_leave}
    done, step = dict[tuple[str, int], list[int]](), 0
    while waiting or engine.has_work:
        while waiting and waiting[0].step <= step:
            one = waiting.pop(0)
            engine.add_request(one.rid, one.ids, one.sampling)
        for rid in sorted({choice.rid for choice in engine.choices.values()} & leaving):
            if draw.random() < 0.06:
                engine.abort(rid)
                leaving.remove(rid)
        for out in engine.step():
            if out.finish_reason is not None:
                done[out.rid, out.index] = out.token_ids
        engine.scheduler.check_invariant()
        step += 1
        assert step < 5000, "it does not end"
    return done


class ChangingPolicy(SplitPrefillPolicy):
    """Turns of one layer or two, a share, or nothing, whatever was measured."""

    draw = random.Random(0)

    def decide(self, queue: PromptQueue, batch_size: int) -> SplitDecision:
        if not batch_size:
            return super().decide(queue, batch_size)
        layers, share = self.draw.choice([(0, None), (1, None), (2, None), (1, 0.5), (2, 0.5)])
        return SplitDecision(min(layers, queue.layers_left), share, "by chance")


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", ["plain", "NGRAM", "EAGLE3", "MTP layers", "qwen3next"])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic_is_answered_as_without_split_prompts(
    seed: int,
    name: str,
    on_device: bool,
    folders: dict[str, tuple[Path, SpecConfig]],
    target: Path,
    small_models: dict[str, Path],
) -> None:
    lookup = SpecConfig(algorithm="NGRAM", num_draft_tokens=5)
    subjects: dict[str, tuple[Path, SpecConfig | None]] = {
        **folders,
        "plain": (target, None),
        "NGRAM": (target, lookup),
        "qwen3next": (small_models["qwen3next"], lookup),
    }
    draw, common = random.Random(seed), {"max_running_requests": 6, "context_length": CONTEXT}
    expected = play(make(*subjects[name], **common, max_total_tokens=4000), seed)
    flags: dict[str, Any] = {
        "max_total_tokens": draw.choice([420, 700, 3000]),
        "page_size": draw.choice([1, 4]),
        "chunked_prefill_size": draw.choice([48, 128, -1]),
        "pdmux_layers": draw.choice([1, 2, None]),
    }
    pdmux = {"enable_pdmux": True, "pdmux_min_tokens": 24}
    llm = make(*subjects[name], **pdmux, **common, **flags)
    split = split_of(llm)
    if on_device:
        run_on_device(llm, sizes=(1, 2, 4, 8))
        split.streams = PretendedStreams()
        split.policy = ChangingPolicy(3, (0.5,))
        assert llm.engine.pipeline is not None
        join_pipeline(split, llm.engine.pipeline)
    found = play(llm, seed)
    both = found.keys() & expected.keys()
    assert len(both) > 25
    assert {key: found[key] for key in both} == {key: expected[key] for key in both}
    assert split.counters["prefills"] > 10
    assert not split.jobs
    assert llm.engine.stats().num_free_slots == llm.engine.stats().num_slots
