"""Whole engines that keep what their rounds cost in a file: those that measure it at start, and
those that learn it while they serve."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ConfigError
from specengine.engine import build, pipeline_build
from specengine.engine.adaptive.cost_file import CostFile, read_table
from specengine.engine.adaptive.costs import RunningCosts, StepCosts
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.async_engine import AsyncEngine
from specengine.engine.cost_facts import _digest, apply_cost_file, keep_at_the_end
from specengine.engine.pipeline_build import make_pipeline
from specengine.engine.round.build import DraftedBy, compose
from specengine.engine.round.executor import RoundExecutor
from tests.support.adaptive import seen
from tests.support.device_rounds import run_on_device, without_graphs
from tests.support.rounds import ON_CPU

TEXT = SpecConfig(algorithm="NGRAM", ngram_min_match=1, num_draft_tokens=6)
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
PROMPTS = ["abcabcabcabcabc", "0123456789" * 4, "abab" * 4]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "costs.json"


@pytest.fixture
def layer(drafters: dict[str, str], path: Path) -> SpecConfig:
    return SpecConfig(
        algorithm="EAGLE3",
        draft_model_path=drafters["EAGLE3"],
        num_steps=3,
        cost_table=str(path),
    )


def make(target: Path, spec: SpecConfig, **flags: Any) -> LLM:
    return LLM(str(target), spec, **{"dtype": "float32", "max_total_tokens": 2048, **flags})


class Start:
    """The start of an engine with device rounds on a CPU: `build` does the same where there is a
    GPU."""

    def __init__(
        self,
        target: Path,
        spec: SpecConfig,
        monkeypatch: pytest.MonkeyPatch,
        most: int = 4,
        left: list[int] | None = None,
    ) -> None:
        """left: batch sizes that there is memory for; all."""
        found: list[CostFile | None] = []

        def put_off(costs: CostFile | None, *_: object) -> None:
            found.append(costs)

        with monkeypatch.context() as patch:
            patch.setattr(build, "apply_cost_file", put_off)
            patch.setattr(build, "keep_at_the_end", put_off)
            self.llm = make(target, spec)
        self.asked: list[tuple[int, int]] = []
        rounds = run_on_device(self.llm, sizes=(1, 2, most))
        engine = self.llm.engine
        if spec.algorithm == "EAGLE3":
            drafted = DraftedBy(rounds.source, [0, 1, 3])
            rounds = compose(engine.parts.worker.runner, drafted, None, [1, most])
            without_graphs(rounds)
        sizes = rounds.batch_sizes if left is None else left
        monkeypatch.setattr(rounds, "capture", lambda: setattr(rounds, "batch_sizes", sizes))
        monkeypatch.setattr(pipeline_build, "seconds_of", self.seconds_of)
        apply_cost_file(found[0], engine, rounds)
        engine.pipeline = make_pipeline(engine.parts.config, engine.parts, rounds, found[0])
        keep_at_the_end(found[0], engine)

    def seconds_of(
        self,
        rounds: RoundExecutor,
        batch_size: int,
        num_steps: int,
        num_nodes: int | None = None,
        context: int = 0,
    ) -> float:
        """Drafts are cheap among few."""
        if not context:
            self.asked.append((batch_size, num_steps))
        return 1.0 + batch_size * num_steps / 3

    @property
    def depths(self) -> DepthChooser:
        assert self.llm.engine.pipeline is not None
        assert self.llm.engine.pipeline.depths.chooser is not None
        return self.llm.engine.pipeline.depths.chooser


def choices(depths: DepthChooser) -> list[int]:
    """At the same outcomes."""
    made = []
    for number in range(300):
        batch_size = 1 if number % 3 else 4
        choice = depths.choose(batch_size)
        drafted = [choice.num_steps] * batch_size
        accepted = [min(choice.num_steps, number % 3)] * batch_size
        depths.observe(seen(choice.num_steps, drafted, accepted))
        made.append(choice.num_steps)
    return made


@ON_CPU
def test_costs_measured_at_start_are_read_at_the_next_start(
    target: Path, layer: SpecConfig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Start(target, layer, monkeypatch)
    assert first.asked == [(size, steps) for size in (4, 1) for steps in (0, 1, 3)]
    kept = path.read_bytes()
    second = Start(target, layer, monkeypatch)
    assert not second.asked
    found = [one.depths.costs for one in (first, second)]
    assert isinstance(found[0], StepCosts)
    assert isinstance(found[1], StepCosts)
    assert found[0].seconds == found[1].seconds
    made = choices(first.depths)
    assert made == choices(second.depths)
    assert len({*made}) > 1, "costs and outcomes count"
    first.llm.engine.close()
    second.llm.generate(PROMPTS, GREEDY)
    second.llm.engine.close()
    assert path.read_bytes() == kept


@ON_CPU
def test_without_a_file_nothing_is_kept(
    target: Path, layer: SpecConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start(target, replace(layer, cost_table=None), monkeypatch)
    assert len(start.asked) == 6
    assert not list(tmp_path.iterdir())


@ON_CPU
def test_rounds_of_the_host_do_not_take_the_devices_costs(
    target: Path, layer: SpecConfig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cost something else. A table by hand holds for both, whatever the host takes."""
    Start(target, layer, monkeypatch)
    start = Start(target, layer, monkeypatch)
    assert start.depths.host is not None
    adaptive = start.llm.engine.parts.adaptive
    assert adaptive is not None
    assert isinstance(adaptive.chooser.costs, RunningCosts)
    assert adaptive.chooser.costs.learned() is None
    path.write_text('{"seconds": {"1": {"0": 1, "3": 2}}}')
    start = Start(target, layer, monkeypatch)
    adaptive = start.llm.engine.parts.adaptive
    assert adaptive is not None
    assert adaptive.chooser.costs is start.depths.costs
    assert start.depths.host is None
    assert not start.asked


@ON_CPU
def test_costs_of_fewer_graphs_than_wanted_are_not_kept(
    target: Path, layer: SpecConfig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not read either: a small batch takes as long as a large one there."""
    cut = Start(target, layer, monkeypatch, left=[4])
    assert cut.asked == [(4, 0), (4, 1), (4, 3)]
    assert not path.exists()
    Start(target, layer, monkeypatch)
    kept = path.read_bytes()
    assert Start(target, layer, monkeypatch, left=[4]).asked == cut.asked
    assert path.read_bytes() == kept


@ON_CPU
def test_a_file_of_another_engine_is_refused_with_the_difference(
    target: Path, layer: SpecConfig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Start(target, layer, monkeypatch)
    kept = path.read_bytes()
    with pytest.raises(ConfigError, match=r"round_batch_sizes was \[1, 4\] and is \[1, 3\]"):
        Start(target, layer, monkeypatch, most=3)
    with pytest.raises(ConfigError, match="speculative_num_steps was 3 and is 2"):
        Start(target, replace(layer, num_steps=2), monkeypatch)
    with pytest.raises(ConfigError, match="rounds was 'in graphs, on the device' and is 'run by "):
        make(target, layer)
    assert path.read_bytes() == kept


@ON_CPU
def test_graphs_with_drafts_of_the_host_learn_and_keep(
    target: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(TEXT, cost_table=str(path))
    first = Start(target, spec, monkeypatch)
    assert first.asked, "of the device alone"
    assert first.depths.costs.of(4, 1) == 1.0 + 4 / 3
    assert "measuring the cost" in first.depths.choose(3).reason, "the host is to be heard, too"
    first.llm.generate(PROMPTS[0], GREEDY)
    assert not path.exists()
    first.llm.engine.close()
    kept = read_table(path)
    assert kept.seconds.keys() == {1}
    second = Start(target, spec, monkeypatch)
    assert not second.asked
    assert isinstance(second.depths.costs, RunningCosts)
    assert second.depths.costs.of(1, 1) == kept.seconds[1][1]
    assert "measuring the cost" not in second.depths.choose(1).reason
    assert "measuring the cost" in second.depths.choose(3).reason, "no such batch has run"


def test_rounds_of_the_host_learn_and_keep(target: Path, path: Path) -> None:
    spec = replace(TEXT, cost_table=str(path))
    flags = {"disable_cuda_graph": True}
    first = make(target, spec, **flags)
    expected = [one.token_ids for one in first.generate(PROMPTS, GREEDY)]
    first.engine.close()
    kept = path.read_bytes()
    first.engine.close()
    assert path.read_bytes() == kept
    second = make(target, spec, **flags)
    adaptive = second.engine.parts.adaptive
    assert adaptive is not None
    costs = adaptive.chooser.costs
    assert isinstance(costs, RunningCosts)
    assert costs.is_given(3)
    assert costs.of(3, 0) == read_table(path).seconds[4][0]
    assert [one.token_ids for one in second.generate(PROMPTS, GREEDY)] == expected
    del adaptive, costs, second
    gc.collect()
    assert path.read_bytes() != kept, "an engine that is gone has kept what it learned"
    with pytest.raises(ConfigError, match="page_size was 1 and is 16"):
        make(target, spec, **flags, page_size=16)


def test_a_file_of_another_model_is_refused(
    target: Path, small_models: dict[str, Path], path: Path
) -> None:
    spec = replace(TEXT, cost_table=str(path))
    llm = make(target, spec, disable_cuda_graph=True)
    llm.generate(PROMPTS, GREEDY)
    llm.engine.close()
    other = small_models["qwen3"]
    names = f"model was {target.name!r} and is {other.name!r}, model_bytes was "
    with pytest.raises(ConfigError, match=names):
        make(other, spec, disable_cuda_graph=True)


def test_the_digest_of_kernels_changes_with_their_sources_alone(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    source, other = tmp_path / "cuda" / "one.cu", tmp_path / "notes.txt"
    source.write_text("int a;")
    first = _digest(tmp_path)
    other.write_text("nothing that runs")
    assert _digest(tmp_path) == first
    source.write_text("int b;")
    assert _digest(tmp_path) != first


def test_a_server_that_stops_keeps_what_it_learned(target: Path, path: Path) -> None:
    llm = make(target, replace(TEXT, cost_table=str(path)), disable_cuda_graph=True)
    llm.generate(PROMPTS, GREEDY)
    served = AsyncEngine(llm.engine)
    assert not path.exists()
    served.shutdown()
    served.shutdown()
    measured_for = json.loads(path.read_text())["measured_for"]
    assert measured_for["rounds"] == "run by the host"
    assert measured_for["speculative_algorithm"] == "NGRAM"


@pytest.mark.parametrize("where", ["none/costs.json", "damaged.json"])
def test_a_file_is_refused_before_a_model_is_loaded(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "damaged.json").write_text('{"seconds": ')

    def refuse(*_: object) -> None:
        raise AssertionError("looked for a model")

    monkeypatch.setattr(build, "load", refuse)
    with pytest.raises(ConfigError, match="--speculative-cost-table"):
        LLM("tiny", replace(TEXT, cost_table=str(tmp_path / where)))
    with pytest.raises(AssertionError, match="looked for a model"):
        LLM("tiny", replace(TEXT, cost_table=str(tmp_path / "costs.json")))
