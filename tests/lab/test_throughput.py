"""Throughput benches: what is asked, what is reported, and a whole run on a tiny model."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from transformers import AutoConfig

from specengine.core.config import EngineConfig, ModelConfig, ScheduleConfig, SpecConfig
from specengine.core.errors import ConfigError
from specengine.engine.build import build_engine
from specengine.engine.loop import Engine
from specengine.lab.card import Card
from specengine.lab.output import Output
from specengine.lab.throughput.peers import Asked, find_peers
from specengine.lab.throughput.plan import Plan
from specengine.lab.throughput.plot import draw
from specengine.lab.throughput.random_draft import feature_layers, random_eagle3
from specengine.lab.throughput.report import PLAIN, Peers, Point, Report, Setting, Startup
from specengine.lab.throughput.run import ThroughputBench
from specengine.lab.throughput.sheets import settings_lines, sheets
from specengine.lab.throughput.workload import Workload
from specengine.layers.rotary import rotary_fraction
from specengine.runner.loader.source import ModelSource, resolve_model

SMALL = Workload(batch_sizes=(1, 3), prompt_len=8, new_tokens=10, repeats=2)


@pytest.fixture(autouse=True)
def _what_stands_stays_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's own garbage is settled (tests/conftest.py): a bench would look through all that
    is imported, and unsettle it."""
    if gc.get_freeze_count():
        monkeypatch.setattr("specengine.lab.throughput.run.frozen_objects", nullcontext)


def plan(model: Path, workload: Workload = SMALL, **more: Any) -> Plan:
    spec = more.pop("spec", SpecConfig())
    config = EngineConfig(model=ModelConfig(model=str(model), device="cpu"), spec=spec)
    return Plan(config, workload, **more)


SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def test_prompts_differ_and_can_be_had_again() -> None:
    runs = Workload(prompt_len=12, repeats=3).batches(4, vocab_size=320)
    assert [len(run) for run in runs] == [4, 4, 4, 4]
    prompts = [tuple(prompt) for run in runs for prompt in run]
    assert len(set(prompts)) == 16
    assert {len(prompt) for prompt in prompts} == {12}
    assert all(0 <= token < 320 for prompt in prompts for token in prompt)
    assert Workload(prompt_len=12, repeats=3).batches(4, 320) == runs


def test_prompts_that_repeat_themselves() -> None:
    [[prompt], _] = Workload(prompt_len=8, repeats=1, prompt_period=3).batches(1, 50_000)
    assert prompt[:3] == prompt[3:6]
    assert prompt[6:] == prompt[:2]


@pytest.mark.parametrize(
    ("count", "layers"), [(3, [0, 1, 2]), (4, [1, 2, 3]), (30, [1, 14, 26]), (32, [1, 15, 28])]
)
def test_features_are_of_three_layers(count: int, layers: list[int]) -> None:
    assert feature_layers(count) == layers


def test_random_draft_keeps_nothing_of_single_layers_or_their_weights() -> None:
    config = AutoConfig.for_model(
        **SHAPE, model_type="gpt_oss", layer_types=["sliding_attention", "full_attention"] * 2,
        quantization_config={"quant_method": "mxfp4"}, attention_bias=True,
    )  # fmt: skip
    with random_eagle3(config, 32) as folder:
        draft = AutoConfig.from_pretrained(folder)
    assert (draft.model_type, draft.num_hidden_layers, draft.draft_vocab_size) == ("llama", 1, 32)
    assert not draft.attention_bias
    assert not hasattr(draft, "quantization_config")


def test_random_draft_of_latent_attention_has_heads() -> None:
    """Peers would look for latents where the draft's configuration has a rank of theirs."""
    sizes = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = AutoConfig.for_model(**SHAPE, model_type="deepseek_v2", **sizes)
    with random_eagle3(config, 32) as folder:
        draft = AutoConfig.from_pretrained(folder)
    assert not [name for name in (*sizes, "n_routed_experts") if hasattr(draft, name)]
    assert draft.num_attention_heads == config.num_attention_heads


def test_random_draft_rotates_whole_heads_where_its_target_rotates_a_part() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config = AutoConfig.for_model(**SHAPE, model_type="glm4", rope_parameters=rope)
    assert rotary_fraction(config) == 0.25
    with random_eagle3(config, 32) as folder:
        draft = AutoConfig.from_pretrained(folder)
    assert rotary_fraction(draft) == 1.0
    assert draft.rope_parameters["rope_theta"] == 1e4


def test_too_few_layers_for_features() -> None:
    with pytest.raises(ConfigError, match="three layers, and the target has 2"):
        feature_layers(2)


ASKED: dict[str, Any] = {
    "model": "smollm2-shape",
    "algorithm": "EAGLE3",
    "tau": 2.5,
    "gpu": "NVIDIA H200",
    "workload": Workload(),
}


class TestPeers:
    def found(self, **other: Any) -> Peers | None:
        return find_peers(Asked(**{**ASKED, **other}), None)

    def test_the_same_work(self) -> None:
        peers = self.found()
        assert peers is not None
        assert peers.rates["vLLM"] == {1: 1011, 8: 7093, 64: 38309}
        assert peers.rates["SGLang"][64] == 40447
        assert peers.date == "2026-11-21"
        plain = self.found(algorithm=None, tau=None, model="llama-3.1-8b-shape")
        assert plain is not None
        assert plain.rates["SGLang"] == {1: 215, 8: 1644, 64: 10596}

    @pytest.mark.parametrize(
        "other",
        [
            {"model": "another"},
            {"algorithm": "SUFFIX"},
            {"tau": 3.0},
            {"tau": None},
            {"gpu": "NVIDIA A100"},
            {"gpu": None},
            {"workload": Workload(new_tokens=64)},
            {"workload": Workload(temperature=1.0)},
        ],
        ids=str,
    )
    def test_other_work_has_no_peers(self, other: dict[str, Any]) -> None:
        assert self.found(**other) is None

    def test_a_bad_file_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "figures.yaml"
        file.write_text("date: 2026-11-21\n")
        with pytest.raises(ConfigError, match=r"--peers .*figures.yaml: KeyError"):
            find_peers(Asked(**ASKED), file)


def by_hand() -> Report:
    facts = {
        "command": "specengine bench throughput",
        **{"commit": "abc", "cpu": "some CPU", "cores": 2, "threads": 1, "gpu": "NVIDIA H200"},
        **{"python": "3.11", "versions": {"torch": "2.11.0"}},
    }
    peers = Peers("2026-11-21", "by hand", {"vLLM": "0"}, {"vLLM": {1: 100}}, {"vLLM": "112"})
    graphs = {"round": {"captures": 2, "replays": 90, "fallbacks": {"grammar": 3}}}
    drafted = Setting("EAGLE3", {"num_steps": 3}, Startup(4.0, {"load": 4.0}, 9.0), peers, True)
    drafted.points += [Point(1, (300.0, 400.0), 2.5, 102.0, 3.0, 1600.0), Point(2, (500.0,))]
    drafted.graphs = graphs
    plain = Setting(PLAIN, {}, points=[Point(1, (200.0,), 1.0, 255.0, 0.0, 285.0)])
    model = {"name": "smollm2-shape"}
    card = Card("NVIDIA H200", "bfloat16", 4.27e12, 7e14)
    return Report(
        "2026-11-21", facts, "specengine 0", model, Workload((1, 2)), [drafted, plain], card
    )


def test_a_report_compares() -> None:
    report = by_hand()
    drafted = report.settings[0]
    assert report.ratio(drafted, drafted.points[0]) == 2.0
    assert report.ratio(drafted, drafted.points[1]) is None, "plain decoding was not measured"
    assert drafted.points[0].fraction == 0.25
    found = {sheet.title: sheet.rows for sheet in sheets(report)}
    assert found["Output tokens a second"][0] == [
        *["EAGLE3 (lossy)", "1", "400", "2.50", "102.0", "3.00", "25.0%", "2.000", "100", "4.00"]
    ]
    assert found["Start-up"] == [["EAGLE3", "4.0", "9.0", "load 4.0"]]
    assert found["Graphs"] == [["EAGLE3", "round", "2", "90", "3 × grammar"]]


def test_files_of_a_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, output = by_hand(), Output(tmp_path / "all.json", tmp_path / "out", "speed")
    output.check()
    written = output.finish(report, sheets(report), partial(draw, report), settings_lines(report))
    assert [path.name for path in written] == [
        "all.json",
        *(f"2026-11-21-speed{suffix}" for suffix in (".json", ".md", ".png")),
    ]
    [first, _] = json.loads(written[0].read_text())["settings"]
    assert first["points"][0]["ratio_to_plain"] == 2.0
    page = written[2].read_text()
    assert "| EAGLE3 (lossy) | 1 | 400 |" in page
    assert "(2026-11-21-speed.png)" in page
    assert written[3].stat().st_size > 10_000


def test_a_random_draft_beside_plain_decoding(
    small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(drafts))
    # Whichever test is the first to import it leaves a folder: elsewhere.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    seen: list[int] = []
    spec = SpecConfig(simulate_accept_length=3.0, adaptive=False)
    asked = plan(small_models["llama"], spec=spec, random_draft=64, compare_plain=True, copy=1e9)

    def keep(report: Report) -> None:
        seen.append(len(report.settings[0].points))
        assert list(drafts.iterdir()), "the draft is there while it is used"

    def imports(config: ModelConfig) -> ModelSource:
        sleep(0.2)
        return resolve_model(config)

    monkeypatch.setattr("specengine.lab.throughput.plan.resolve_model", imports)

    report = ThroughputBench(asked, keep).run()
    assert seen == [1, 2]
    assert not list(drafts.iterdir()), "and deleted afterwards"
    drafted, plain = report.settings
    assert (drafted.name, plain.name) == ("EAGLE3", PLAIN)
    assert "random" in drafted.options["draft_model_path"]
    assert drafted.is_lossy
    assert not plain.is_lossy
    for setting in report.settings:
        assert [point.batch_size for point in setting.points] == [1, 3]
        for point in setting.points:
            assert len(point.rates) == 2
            assert point.rate == max(point.rates)
            assert point.limit is not None
            assert point.rounds is not None
            assert point.tau is not None
            # The first token comes from the prefill, and what lies past the end is not emitted.
            assert 9 <= point.rounds * point.tau < 9 + point.tau
    assert [point.rounds for point in plain.points] == [9, 9]
    assert drafted.points[0].tau == pytest.approx(3.0, abs=0.5)
    assert drafted.startup is not None
    assert {"load weights", "load draft model", "allocate memory"} <= drafted.startup.phases.keys()
    assert drafted.startup.phases["find model"] > 0.2, "whatever the first to look for it pays"
    json.loads(report.to_json())


def test_engines_take_memory_and_are_measured_within_the_turn(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are loaded before."""
    events: list[str] = []
    place = "specengine.lab.throughput.run"

    def told(name: str) -> Callable[..., Any]:
        real = getattr(import_module(place), name)

        def call(*given: Any) -> Any:
            events.append(name)
            return real(*given)

        return call

    @contextmanager
    def turn() -> Iterator[None]:
        events.append("begins")
        yield
        events.append("ends")

    for name in ("load", "build_engine"):
        monkeypatch.setattr(f"{place}.{name}", told(name))
    asked = plan(small_models["llama"], replace(SMALL, new_tokens=3, repeats=1), copy=1e9)
    ThroughputBench(asked, lambda report: events.append("point"), turn()).run()
    assert events == ["load", "begins", "build_engine", "point", "point", "ends"]


def rows_beside_plain(
    model: Path, monkeypatch: pytest.MonkeyPatch, rows: int | None = None
) -> list[int | None]:
    """The requests that may run in the engine asked for, and in the plain one."""
    found: list[int | None] = []

    def build(config: EngineConfig, *given: Any) -> Engine:
        found.append(config.schedule.max_running_requests)
        return build_engine(config, *given)

    monkeypatch.setattr("specengine.lab.throughput.run.build_engine", build)
    short = replace(SMALL, new_tokens=3, repeats=1)
    asked = plan(model, short, spec=SpecConfig(algorithm="NGRAM"), compare_plain=True, copy=1e9)
    schedule = ScheduleConfig(max_running_requests=rows)
    asked = replace(asked, config=replace(asked.config, schedule=schedule))
    report = ThroughputBench(asked, lambda report: None).run()
    assert all(len(setting.points) == 2 for setting in report.settings)
    return found


def test_two_engines_with_recurrent_state_have_slots_for_the_largest_batch(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows_beside_plain(small_models["qwen3next"], monkeypatch) == [3, 3]
    assert rows_beside_plain(small_models["qwen3next"], monkeypatch, rows=5) == [5, 5]
    assert rows_beside_plain(small_models["llama"], monkeypatch) == [32, 32]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compare_plain": True}, "nothing to compare"),
        ({"random_draft": 321}, "321 tokens: the target has 320"),
        ({"random_draft": 9, "spec": SpecConfig(algorithm="NGRAM")}, "not one of NGRAM"),
        (
            {"random_draft": 9, "spec": SpecConfig(draft_model_path="x")},
            "give one of them",
        ),
        ({"workload": Workload((1,), new_tokens=600)}, "do not fit into a context of 512"),
    ],
)
def test_what_cannot_be_measured(
    changes: dict[str, Any], message: str, small_models: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        ThroughputBench(plan(small_models["llama"], **changes), lambda report: None).run()


def test_batches_larger_than_requests_may_run(small_models: dict[str, Path]) -> None:
    config = EngineConfig(
        model=ModelConfig(model=str(small_models["llama"]), device="cpu"),
        schedule=ScheduleConfig(max_running_requests=2),
    )
    with pytest.raises(ConfigError, match="a batch of 3 is to be measured"):
        ThroughputBench(Plan(config, SMALL), lambda report: None).run()
