"""Another accelerator is one file and one line of the registry: whole engines run in its graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import SpecConfig
from tests.support.fake_platform import FakePlatform, use_fake_platform
from tests.support.rounds import (
    GREEDY,
    ON_CPU,
    PROMPTS,
    SAMPLED,
    assert_same_tokens,
    fallbacks,
    make,
)

SHAPES: dict[str, dict[str, Any]] = {
    "NGRAM": {"ngram_min_match": 1},
    "EAGLE3": {"num_steps": 3},
    "EAGLE3 tree": {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6},
}
KINDS = ["plain", *SHAPES]


def spec_of(kind: str, drafters: dict[str, str]) -> SpecConfig | None:
    if kind == "plain":
        return None
    name = kind.split()[0]
    path = drafters.get(name)
    return SpecConfig(algorithm=name, adaptive=False, draft_model_path=path, **SHAPES[kind])


@ON_CPU
@pytest.mark.parametrize(
    "kind",
    ["EAGLE3", *(pytest.param(one, marks=pytest.mark.slow) for one in KINDS if one != "EAGLE3")],
)
def test_captured_rounds_of_a_fake_accelerator_say_what_the_host_says(
    kind: str, target: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(kind, drafters)
    host = make(target, spec, device="cpu")
    fake = use_fake_platform(monkeypatch)
    llm = make(target, spec, device="cpu", cuda_graph_bs=(1, 2, 4))
    rounds, runner = llm.engine.device_rounds, llm.engine.parts.worker.runner
    assert rounds is not None
    assert runner.decode_graphs is not None
    assert fake.num_captures >= 3 * len(rounds.steps) + 3
    for params in ([GREEDY] * 3, SAMPLED[:2]):
        assert_same_tokens(host, llm, PROMPTS[: len(params)], params)
    assert fallbacks(rounds) == set()
    assert rounds.counters["replays"] > 10
    assert fake.num_replays > rounds.counters["replays"]
    assert runner.graph_memory.used == 10 * fake.num_captures, "counted as on a GPU"


@ON_CPU
@pytest.mark.slow
def test_costs_of_rounds_are_measured_with_its_events(
    target: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Depths are chosen by what replays take."""
    use_fake_platform(monkeypatch)
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=drafters["EAGLE3"], num_steps=3)
    llm = make(target, spec, device="cpu", cuda_graph_bs=(1, 2))
    assert llm.generate(PROMPTS[:2], GREEDY)
    assert llm.engine.pipeline is not None
    assert llm.engine.pipeline.depths.chooser is not None


@ON_CPU
def test_replay_that_does_not_wait_for_its_capture_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fake can fail."""
    fake: FakePlatform = use_fake_platform(monkeypatch)
    with fake.on_stream(fake.capture_stream()):
        graph, _ = fake.record(lambda: None, fake.graph_pool(), fake.capture_stream())
    with pytest.raises(AssertionError, match="does not wait"):
        graph.replay()
    fake.current_stream().wait_stream(fake.capture_stream())
    graph.replay()


@ON_CPU
def test_no_graph_is_for_more_requests_than_may_run(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent state has no room for what padding beyond them would write."""
    use_fake_platform(monkeypatch)
    flags: dict[str, Any] = {"max_running_requests": 2, "cuda_graph_bs": (1, 4, 16)}
    llm = make(small_models["qwen3next"], None, device="cpu", **flags)
    assert llm.engine.parts.config.graph.cuda_graph_bs == (1, 2)
    assert llm.generate(PROMPTS[:2], GREEDY)
    rounds = llm.engine.device_rounds
    assert rounds is not None
    assert fallbacks(rounds) == set()
    assert rounds.counters["replays"] > 0
