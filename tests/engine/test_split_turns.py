"""Long prompts in turns with rounds on an accelerator: layers and rounds run one after the other,
and the host waits for none of them in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor

from specengine import LLM, SpecConfig
from specengine.runner.graph_cache import Captured
from specengine.runner.split_streams import BesideRounds, DoneCall, SplitStreams
from tests.engine.test_split_prefill import (
    ALGORITHMS,
    GREEDY,
    PDMUX,
    Arrivals,
    make,
    play,
    split_of,
)
from tests.engine.test_split_prefill import ARRIVALS as FIRST
from tests.support.fake_platform import FakePlatform, FakeStream, use_fake_platform
from tests.support.rounds import ON_CPU

pytestmark = ON_CPU
# Two that decode, two long ones at once; one more while those are under way, and a short one.
ARRIVALS: Arrivals = {0: FIRST[0], 2: FIRST[2], 5: FIRST[3]}
FLAGS_FAKE: dict[str, Any] = {**PDMUX, "cuda_graph_bs": (1, 2, 4, 8)}


@dataclass
class Watch:
    """What an engine launches, in order: "round", "layers", or "head" once a prompt ends.

    Asserts the order on the device. Of `late`: calls that had not ended when the host launched the
    round behind them.
    """

    llm: LLM
    fake: FakePlatform
    order: list[str] = field(default_factory=list)
    in_flight: list[bool] = field(default_factory=list)  # a round, at each turn
    late: int = 0

    def __post_init__(self) -> None:
        split, rounds = split_of(self.llm), self.llm.engine.device_rounds
        assert isinstance(split.streams, BesideRounds)
        assert rounds is not None
        self.first, self.whole = self.fake.current_stream(), cast(FakeStream, split.streams.whole)
        runner: Any = split.runner
        cache: Any = rounds.cache
        fake: Any = self.fake
        self.layers, runner.split_layers = runner.split_layers, self.run_layers
        self.replay, cache.replay = cache.replay, self.run_round
        self.read, fake.read_on = fake.read_on, self.run_head

    def run_layers(self, *given: Any) -> Any:
        stream, pipeline = self.fake.current_stream(), self.llm.engine.pipeline
        assert stream is self.whole
        assert self.first.seen <= stream.seen, "layers run beside a round"
        assert pipeline is not None
        self.in_flight.append(pipeline.has_in_flight)
        self.order.append("layers")
        return self.layers(*given)

    def run_round(self, graph: Captured[object]) -> None:
        stream = self.fake.current_stream()
        assert stream is self.first
        if self.order and self.order[-1] == "layers":
            assert self.whole.seen <= stream.seen, "a round runs beside layers"
            self.late += sum(not one.call.is_done for one in split_of(self.llm)._running)
        self.order.append("round")
        self.replay(graph)

    def run_head(self, tensor: Tensor, stream: Any) -> None:
        assert stream is self.first
        assert self.whole.seen <= stream.seen, "the head runs beside layers"
        self.order.append("head")
        self.read(tensor, stream)


@pytest.fixture(scope="module")
def subjects(
    folders: dict[str, tuple[Path, SpecConfig]], target: Path
) -> dict[str, tuple[Path, SpecConfig | None]]:
    lookup = {n: (target, SpecConfig(algorithm=n, num_draft_tokens=5)) for n in ALGORITHMS[1:3]}
    return {**folders, **lookup, "plain": (target, None)}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("EAGLE3", 1),
        ("NGRAM", 1),
        *(
            pytest.param(name, layers, marks=pytest.mark.slow)
            for name in ALGORITHMS
            for layers in (1, 2, 3)
            if (name, layers) not in (("EAGLE3", 1), ("NGRAM", 1))
        ),
    ],
)
def test_layers_take_turns_with_rounds_that_the_host_does_not_wait_for(
    name: str,
    layers: int,
    subjects: dict[str, tuple[Path, SpecConfig | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, spec = subjects[name]
    whole = play(make(folder, spec), ARRIVALS)
    fake = use_fake_platform(monkeypatch)
    llm = make(folder, spec, **FLAGS_FAKE, pdmux_layers=layers)
    watch = Watch(llm, fake)
    found = play(llm, ARRIVALS)
    assert {rid: one.token_ids for rid, one in found.items()} == {
        rid: one.token_ids for rid, one in whole.items()
    }
    beside = watch.order[watch.order.index("layers") :]
    assert ("layers", "layers") not in pairwise(beside), "two turns between two rounds"
    assert beside.count("layers") >= 2 * -(-3 // layers)
    assert layers == 3 or watch.late > 0, "the host has waited for layers"
    assert layers == 3 or name == "NGRAM" or any(watch.in_flight), "the host has waited for a round"
    stats = llm.engine.stats()
    assert stats.split is not None
    assert stats.split.num_turns == stats.split.num_calls == beside.count("layers")
    assert stats.num_free_slots == stats.num_slots


def test_head_follows_the_last_layers_without_a_round_between(
    subjects: dict[str, tuple[Path, SpecConfig | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the host has not waited for the layers: the device goes on with the head."""
    folder, spec = subjects["EAGLE3"]
    fake = use_fake_platform(monkeypatch)
    llm = make(folder, spec, **FLAGS_FAKE, pdmux_layers=2)
    watch = Watch(llm, fake)
    play(llm, {0: ARRIVALS[0], 2: ARRIVALS[2]})
    first = watch.order.index("head")
    assert watch.order[first - 1] == "layers"
    assert watch.order[:first].count("layers") == 2


def test_short_prompt_between_two_turns_brings_no_second_turn_before_its_round(
    subjects: dict[str, tuple[Path, SpecConfig | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the first turn, and no round follows until it has run."""
    folder, spec = subjects["EAGLE3"]
    fake = use_fake_platform(monkeypatch)
    llm = make(folder, spec, **FLAGS_FAKE, pdmux_layers=1)
    watch, came = Watch(llm, fake), list[int]()

    def bring(llm: LLM, step: int) -> None:
        if "layers" in watch.order and not came:
            came.append(len(watch.order))
            llm.engine.add_request("f", *FIRST[3][1][1:], GREEDY)

    done = play(llm, {0: FIRST[0], 2: FIRST[2]}, amid=bring)
    assert "f" in done
    assert watch.order.index("head") > came[0], "the prompt was under way"
    assert ("layers", "layers") not in pairwise(watch.order)
    assert watch.order.count("layers") == 3


def test_rounds_that_bear_no_layers_run_without_them(
    subjects: dict[str, tuple[Path, SpecConfig | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy gives none in two rounds of three."""
    folder, spec = subjects["EAGLE3"]
    fake = use_fake_platform(monkeypatch)
    llm = make(folder, spec, **FLAGS_FAKE)
    policy, watch, asked = split_of(llm).policy, Watch(llm, fake), list[int]()
    decide = policy.decide

    def seldom(queue: Any, batch_size: int) -> Any:
        found = decide(queue, batch_size)
        asked.append(batch_size)
        layers = 1 if len(asked) % 3 == 0 else 0
        return found if not batch_size else found.__class__(layers, None, "seldom")

    monkeypatch.setattr(policy, "decide", seldom)
    play(llm, {0: ARRIVALS[0], 2: ARRIVALS[2]})
    beside = watch.order[watch.order.index("layers") : watch.order.index("head")]
    assert beside == ["layers", *["round"] * 3, "layers", *["round"] * 3, "layers"]


class SlowTurns(SplitStreams):
    """Each call is said to have taken a second, and what follows the last layer another."""

    def launch(self, share: float | None, run: Callable[[], Any]) -> tuple[Any, Any]:
        return run(), DoneCall(1.0)

    take_turn = stay = lambda self, run: self.launch(None, run)


def test_policy_is_told_once_of_what_turns_and_heads_take(
    subjects: dict[str, tuple[Path, SpecConfig | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the time between two rounds is no round's."""
    llm = make(*subjects["EAGLE3"], **PDMUX, pdmux_layers=1)
    split, told, rounds = split_of(llm), list[float](), list[float]()
    monkeypatch.setattr(split, "streams", SlowTurns())

    def saw_round(size: int, seconds: float, beside: object = None, delay: float = 0.0) -> None:
        told.append(delay)
        rounds.append(seconds)

    monkeypatch.setattr(split.policy, "saw_round", saw_round)
    monkeypatch.setattr(split.policy, "saw_delay", told.append)
    play(llm, ARRIVALS)
    counters = split.counters
    assert sum(told) + split._in_turn == counters["calls"] + counters["prefills"] > 4
    assert rounds
    assert min(rounds) > 0.0
