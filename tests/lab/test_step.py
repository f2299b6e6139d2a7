"""Where a round's time goes: stopwatches, watched parts, reports, and whole runs on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SpecConfig
from specengine.core.config import EngineConfig, ModelConfig
from specengine.engine.round.key import RoundKey
from specengine.engine.round.sampling import PLAIN, SamplingFeatures
from specengine.lab.card import Card
from specengine.lab.output import Output
from specengine.lab.round_work import Work
from specengine.lab.step import measure as step_measure
from specengine.lab.step import stopwatch, timeline
from specengine.lab.step.attribution import DeviceRound, NodeTime, nodes_in_order
from specengine.lab.step.measure import Counted, OnDevice, captured_nodes
from specengine.lab.step.parts import captured_parts
from specengine.lab.step.plot import draw
from specengine.lab.step.report import PARTS, Report
from specengine.lab.step.run import StepBench, captured_step, counted_step
from specengine.lab.step.sheets import sheets
from specengine.lab.step.stopwatch import Stopwatch, Watched, watching
from specengine.lab.throughput.plan import Plan
from specengine.lab.throughput.workload import Workload
from tests.draft.eagle_checkpoints import eagle3
from tests.support.device_rounds import run_on_device
from tests.support.rounds import ON_CPU

CARD = Card("by hand", "bfloat16", copy=1e12, matmul=1e15)
WORK = {"verify": Work(50e6, 1e9), "draft": Work(1e6, 1e6)}


class Clock:
    """Moves on by what is run in it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Layers:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def outer(self, seconds: float) -> float:
        self.clock.now += seconds
        self.inner()
        self.clock.now += seconds
        return seconds

    def inner(self) -> None:
        self.clock.now += 10.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "perf_counter", clock)
    return clock


class TestStopwatch:
    def test_parts_count_without_those_within(self, clock: Clock) -> None:
        layers, watch = Layers(clock), Stopwatch()
        watched = [Watched(layers, "outer", "a"), Watched(layers, "inner", "b")]
        with watching(watched, watch.part):
            assert layers.outer(1.0) == 1.0
            clock.now += 100.0  # of no part
            layers.outer(2.0)
        assert dict(watch.seconds) == {"a": 6.0, "b": 20.0}
        assert dict(watch.counts) == {"a": 2, "b": 2}

    def test_methods_are_put_back(self, clock: Clock) -> None:
        layers, watch = Layers(clock), Stopwatch()
        original = Layers.__dict__["inner"]
        with watching([Watched(layers, "outer", "a"), Watched(Layers, "inner", "b")], watch.part):
            assert "outer" in vars(layers)
            layers.outer(1.0)
        assert "outer" not in vars(layers)
        assert Layers.__dict__["inner"] is original
        layers.outer(1.0)
        assert watch.counts["b"] == 1

    def test_what_was_counted_can_be_forgotten(self, clock: Clock) -> None:
        layers, watch = Layers(clock), Stopwatch()
        with watching([Watched(layers, "inner", "b")], watch.part):
            layers.inner()
            watch.clear()
            layers.inner()
        assert dict(watch.seconds) == {"b": 10.0}

    def test_the_device_is_waited_for_at_each_border(self, clock: Clock) -> None:
        def sync() -> None:
            clock.now += 1.0

        watch = Stopwatch(sync)
        with watch.part("a"), watch.part("b"):
            clock.now += 5.0
        assert dict(watch.seconds) == {"a": 2.0, "b": 6.0}


@ON_CPU
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
def test_parts_of_a_captured_round(
    samples: bool, small_models: dict[str, Path], tmp_path: Path
) -> None:
    draft = eagle3(tmp_path / "draft", small_models["llama"])
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=str(draft), num_steps=2)
    llm = LLM(str(small_models["llama"]), spec, dtype="float32", max_total_tokens=256)
    rounds, open_now = run_on_device(llm), list[str]()
    entered: list[tuple[str, ...]] = []

    @contextmanager
    def note(part: str) -> Iterator[None]:
        open_now.append(part)
        entered.append(tuple(open_now))
        yield
        open_now.pop()

    with watching(captured_parts(llm.engine, rounds), note):
        rounds.bind(RoundKey(2, rounds.steps[-1], SamplingFeatures(samples=samples))).run()
    assert entered == [
        ("draft",),
        ("draft", "draft head"),
        ("draft", "draft head"),
        ("verify",),
        *([("verify",), ("verify", "verify head"), ("sample",)] if samples else [("verify head",)]),
        ("keep",),
        ("observe",),
    ]
    assert {part for path in entered for part in path} <= PARTS.keys()


def into(entered: list[str]) -> Callable[[str], AbstractContextManager[None]]:
    """For `watching`: notes each part that begins."""

    @contextmanager
    def note(part: str) -> Iterator[None]:
        entered.append(part)
        yield

    return note


@ON_CPU
@pytest.mark.parametrize("verify", ["auto", "relaxed"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chains", "trees"])
def test_parts_of_a_stochastic_round(
    topk: int,
    verify: str,
    small_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = eagle3(tmp_path / "draft", small_models["llama"])
    given: dict[str, Any] = {"draft_model_path": str(draft), "num_steps": 2, "eagle_topk": topk}
    given |= {"draft_sampling": True, "verify": verify}
    spec = SpecConfig(algorithm="EAGLE3", adaptive=False, **given)
    llm = LLM(str(small_models["llama"]), spec, dtype="float32", max_total_tokens=256)
    rounds, entered = run_on_device(llm), list[str]()
    with watching(captured_parts(llm.engine, rounds), into(entered)):
        rounds.bind(RoundKey(2, 2, rounds.sampling.sampled)).run()
    heads = ["draft", "draft head", "draft head"]
    verified = ["verify", "verify", "verify head"]
    assert entered == [*heads, *verified, "accept", "sample", "keep", "observe"]


@ON_CPU
@pytest.mark.parametrize("deep", [False, True], ids=["the model's depth", "deeper"])
@pytest.mark.parametrize("verify", ["match", "target_only"])
def test_parts_of_a_hybrid_tree_round(
    verify: str,
    deep: bool,
    small_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = eagle3(tmp_path / "draft", small_models["llama"])
    given: dict[str, Any] = {"draft_model_path": str(draft), "num_steps": 2, "eagle_topk": 2}
    given |= {"hybrid_suffix": True, "num_draft_tokens": 6, "verify": verify}
    spec = SpecConfig(algorithm="EAGLE3", adaptive=False, **given)
    llm = LLM(str(small_models["llama"]), spec, dtype="float32", max_total_tokens=256)
    rounds, entered = run_on_device(llm), list[str]()
    assert rounds.steps == [2, 5]
    with watching(captured_parts(llm.engine, rounds), into(entered)):
        features = rounds.sampling.sampled if verify == "target_only" else PLAIN
        rounds.bind(RoundKey(2, 5 if deep else 2, features)).run()
    stochastic = ["accept", "sample"] if verify == "target_only" else []
    parts = ["draft", "draft head", "verify", "verify head", *stochastic, "keep", "observe"]
    assert [*dict.fromkeys(entered)] == parts


@ON_CPU
def test_marks_of_a_real_profile(
    small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the operators of a round stand for its kernels."""
    draft = eagle3(tmp_path / "draft", small_models["llama"])
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=str(draft), num_steps=2)
    llm = LLM(str(small_models["llama"]), spec, dtype="float32", max_total_tokens=256)
    kinds = timeline._KERNELS
    monkeypatch.setattr(timeline, "_KERNELS", (*kinds, "cpu_op"))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    only = [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(step_measure, "_activities", lambda on_host: only)
    rounds = run_on_device(llm)
    turn = int(rounds.state.turn)
    nodes = captured_nodes(llm.engine, rounds, batch_size=3, num_steps=2)
    assert int(rounds.state.turn) == turn, "the halves of the buffer are as they were"
    order = nodes_in_order([NodeTime(node.name, node.part, 0.0, 0.0) for node in nodes])
    assert order == [
        *["begin", "draft", "draft head", "draft", "draft head", "draft", "begin"],
        *["verify", "verify head", "accept", "observe"],
    ]
    heads = [node for node in nodes if node.part == "verify head"]
    assert any("argmax" in node.name for node in heads)


def on_device() -> OnDevice:
    nodes = (
        NodeTime("_begin", "begin", 2.0, 0.0),
        NodeTime("_layer", "verify", 60.0, 1.0),
        NodeTime("_layer", "verify", 40.0, 4.0),
        NodeTime("_accept", "accept", 3.0, 1.0),
    )
    host = {"schedule and commit": 20e-6, "launch": 9e-6}
    return OnDevice(DeviceRound(nodes, 9.0, 77), host, {"cudaGraphLaunch": 1.0}, 125e-6)


def report() -> Report:
    facts = {
        **{"command": "specengine bench step", "commit": "abc", "cpu": "some CPU", "cores": 2},
        **{"threads": 1, "gpu": None, "python": "3.11", "versions": {"torch": "2.11.0"}},
    }
    counted = Counted({"host": 1e-4, "verify": 3e-4}, rounds=12)
    steps = [
        captured_step(on_device(), 1, 3.0, 158.0, WORK, CARD),
        counted_step(counted, 4, 3.0, 158.0, WORK, CARD),
    ]
    options, model = {"algorithm": "EAGLE3"}, {"name": "tiny"}
    return Report("2026-11-21", facts, model, options, Workload(), CARD, "by hand", steps)


def test_a_captured_round_is_reported() -> None:
    step = report().points[0]
    assert step.seconds == pytest.approx(120e-6)
    verify = step.parts[1]
    assert (verify.name, verify.kernels) == ("verify", 2)
    assert verify.seconds == pytest.approx(100e-6)
    assert verify.idle == pytest.approx(5e-6)
    assert verify.least == pytest.approx(50e-6)
    assert verify.fraction == pytest.approx(0.5)
    assert step.least == pytest.approx(50e-6), "of the parts that ran"


def test_tables_add_up() -> None:
    first, host, second, parts = sheets(report())
    rows = {row[0]: row for row in first.rows}
    assert rows["verify"][1:6] == ["100.0", "87.5%", "5.0", "2", "50"]
    assert rows["between rounds"][1:3] == ["9.0", "7.5%"]
    assert rows["a round"][1:5] == ["120.0", "100.0%", "6.0", "4"]
    shares = [float(row[2].rstrip("%")) for row in first.rows[:-1]]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert ["launch", "9.0"] in [list(row) for row in host.rows]
    assert "cudaGraphLaunch 1.00" in host.note
    assert [row[0] for row in second.rows] == ["host", "verify", "a round"]
    assert parts.note == "by hand"
    [nodes] = [sheet for sheet in sheets(report(), with_nodes=True) if "nodes" in sheet.title]
    assert [row[1] for row in nodes.rows] == ["begin", "verify", "verify", "accept"]
    assert nodes.note == "In order: begin, verify, accept."


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = report()
    output = Output(None, tmp_path, "step")
    names = [path.name for path in output.finish(done, sheets(done), partial(draw, done))]
    assert names == [f"2026-11-21-step{suffix}" for suffix in (".json", ".md", ".png")]
    written = json.loads((tmp_path / names[0]).read_text())
    assert written["points"][0]["nodes"][1]["part"] == "verify"
    assert written["points"][0]["least"] == pytest.approx(50e-6)


@ON_CPU
@pytest.mark.parametrize(("vocab", "temperature"), [(64, 0.0), (None, 0.0), (64, 0.8)])
def test_rounds_on_the_cpu(
    vocab: int | None, temperature: float, small_models: dict[str, Path]
) -> None:
    forced = None if vocab is None else 2.0
    config = EngineConfig(
        model=ModelConfig(model=str(small_models["llama"]), device="cpu"),
        spec=SpecConfig(simulate_accept_length=forced),
    )
    seen: list[int] = []
    work = Workload((1, 2), prompt_len=6, new_tokens=13, temperature=temperature)
    plan = Plan(config, work, random_draft=vocab)
    done = StepBench(plan, lambda report: seen.append(len(report.points))).run()
    assert seen == [1, 2]
    for step in done.points:
        assert not step.is_captured
        assert step.seconds == pytest.approx(sum(part.seconds for part in step.parts))
        names = [part.name for part in step.parts]
        drafts = ["draft", "draft head"] if vocab else ["draft"]
        assert sorted(names) == sorted(
            [*drafts, "host", "prepare", "verify", "verify head", "sample", "accept", "observe"]
        )
        assert step.steps == pytest.approx(3.0, abs=0.5) if vocab else step.steps == 0
        # Every round gives 2 of the 12 tokens that are left after the prefill, or 1.
        assert step.rounds == 6 if vocab else step.rounds == 12
    json.loads(done.to_json())
