"""Whole benches on small random models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specengine.core.config import EngineConfig, MemoryConfig, ModelConfig, SpecConfig
from specengine.core.errors import ModelLoadError
from specengine.engine.loop import Engine
from specengine.lab.accept.measure import Run, Sampling, draft_vocabulary, measure
from specengine.lab.accept.prompts import PromptSet, find_prompt_sets
from specengine.lab.accept.report import Report
from specengine.lab.accept.run import AcceptBench, Plan
from specengine.lab.accept.settings import Setting
from specengine.lab.accept.speed import SpeedPlan
from tests.draft.eagle_checkpoints import eagle3

ROWS: list[dict[str, Any]] = [
    {"category": "a", "turns": ["abcabcabcabc", "abcabc again"]},
    {"category": "b", "turns": ["one two one two one two"]},
    {"category": "b", "turns": ["x" * 40, "y" * 9]},
]
NGRAM = Setting("n-gram", SpecConfig(algorithm="NGRAM", ngram_min_match=1))
TREE = Setting("tree", SpecConfig(algorithm="SUFFIX", suffix_branches=3, num_draft_tokens=12))


class Watched:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.answers = 0
        self.reports: list[dict[str, Any]] = []

    def starts(self, name: str, num_answers: int) -> None:
        self.started.append((name, num_answers))

    def answered(self, num_tokens: int) -> None:
        assert num_tokens > 0
        self.answers += 1

    def has_come(self, report: Report) -> None:
        self.reports.append(json.loads(report.to_json()))


@pytest.fixture(autouse=True)
def keeps_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting it takes a second beside all that a test run keeps."""
    monkeypatch.setattr("gc.collect", lambda: 0)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptSet:
    path = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return find_prompt_sets([str(path)], None)[0]


@pytest.fixture(scope="module")
def plan(small_models: dict[str, Path], prompts: PromptSet) -> Plan:
    config = EngineConfig(model=ModelConfig(model=str(small_models["llama"]), device="cpu"))
    return Plan(config, (NGRAM, TREE), (prompts,), max_new_tokens=16, batch_size=4)


def bench(plan: Plan, **changes: Any) -> tuple[Report, Watched, AcceptBench]:
    watched = Watched()
    made = AcceptBench(replace(plan, **changes), watched)
    return made.run(), watched, made


def test_counts_are_the_engines_own(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the counters that each request keeps itself."""
    found: list[tuple[int, int, int]] = []
    step = Engine.step

    def watched_step(engine: Engine) -> Any:
        outputs = step(engine)
        found.extend(
            (one.spec.num_rounds, one.spec.num_accepted, one.spec.num_draft_tokens)
            for one in outputs
            if one.finish_reason is not None
        )
        return outputs

    monkeypatch.setattr(Engine, "step", watched_step)
    report, _, _ = bench(plan, settings=(TREE,), temperatures=(0.7,))
    summary = report.settings[0].runs[0].summary
    steps, accepted, drafted = (sum(column) for column in zip(*found, strict=True))
    assert summary.overall.rounds == steps
    assert summary.overall.tau.value == pytest.approx(1 + accepted / steps)
    assert summary.drafted_per_round == pytest.approx(drafted / steps)


def test_settings_see_the_same_conversations(plan: Plan) -> None:
    report, watched, made = bench(plan, temperatures=(0.0, 1.0))
    assert [setting.name for setting in report.settings] == ["n-gram", "tree"]
    for setting in report.settings:
        assert [run.temperature for run in setting.runs] == [0.0, 1.0]
        for run in setting.runs:
            # Matched drafts change no token, whatever the drafter, at any temperature.
            assert (run.answers, run.same_answers) == (5, 5)
            assert run.conversation == "n-gram"
            assert [group.label for group in run.summary.by_turn] == ["turn 1", "turn 2"]
    emitted = [kept.run.table.emitted.sum() for kept in made.kept]
    assert emitted[0] == emitted[2]
    assert emitted[1] == emitted[3]
    assert [one.temperature for one in report.differences] == [0.0, 1.0]
    assert watched.started[0] == ("n-gram, temperature 0", 5)
    assert watched.answers == 4 * 5


def test_differences_are_of_pairs_of_settings(plan: Plan) -> None:
    report, _, _ = bench(plan)
    [one] = report.differences
    taus = [setting.runs[0].summary.overall.tau.value for setting in report.settings]
    assert (one.first, one.second, one.label) == ("tree", "n-gram", "all")
    assert one.tau.value == pytest.approx(taus[1] - taus[0])


def test_the_batch_size_changes_nothing(plan: Plan) -> None:
    alone, _, one_by_one = bench(plan, batch_size=1, temperatures=(0.0, 0.8))
    together, _, at_once = bench(plan, batch_size=3, temperatures=(0.0, 0.8))
    for first, second in zip(one_by_one.kept, at_once.kept, strict=True):
        assert first.run.answers == second.run.answers
        for name in ("emitted", "stood", "tried", "num_drafted", "context"):
            columns = [sorted_rounds(kept.run, name) for kept in (first, second)]
            assert (columns[0] == columns[1]).all(), name
    for ours, theirs in zip(alone.settings, together.settings, strict=True):
        for run, other in zip(ours.runs, theirs.runs, strict=True):
            assert run.summary.overall.tau == other.summary.overall.tau
            assert run.summary.histogram == other.summary.histogram


def sorted_rounds(run: Run, column: str) -> Any:
    """By request, and in order of time."""
    table = run.table
    return getattr(table, column)[np.lexsort((table.context, table.request))]


def test_what_fails_costs_nothing_else(plan: Plan) -> None:
    broken = Setting("broken", SpecConfig(algorithm="EAGLE3", draft_model_path="nowhere"))
    odd = Setting("odd", SpecConfig(algorithm="NGRAM", num_steps=3))
    report, watched, _ = bench(plan, settings=(broken, NGRAM, odd))
    by_name = {setting.name: setting for setting in report.settings}
    assert "neither a directory nor a hub id" in str(by_name["broken"].error)
    assert "--speculative-num-steps is for algorithms that draft" in str(by_name["odd"].error)
    assert by_name["n-gram"].error is None
    assert len(by_name["n-gram"].runs) == 1
    # Results came as they were made.
    assert [len(one["settings"]) for one in watched.reports] == [1, 2, 2, 3]
    assert watched.reports[1]["settings"][1]["runs"][0]["summary"]["overall"]["rounds"] > 0


def test_a_fault_in_the_middle_is_named(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("specengine.draft.suffix.drafter.SuffixDrafter.draft", fail)
    report, _, _ = bench(plan, settings=(TREE, NGRAM))
    assert report.settings[0].error == "ZeroDivisionError: a bug"
    assert report.settings[1].runs[0].conversation == "n-gram"


def test_a_target_that_is_not_there(plan: Plan) -> None:
    config = EngineConfig(model=ModelConfig(model="nowhere"))
    with pytest.raises(ModelLoadError, match="no model 'nowhere'"):
        bench(plan, config=config)


def test_lossy_answers_stand_in_nobodys_conversation(plan: Plan) -> None:
    lossy = Setting("lossy", replace(NGRAM.spec, verify="relaxed", relaxed_delta=1.0))
    report, _, _ = bench(plan, settings=(lossy, NGRAM))
    first, second = report.settings
    assert first.is_lossy
    assert not second.is_lossy
    assert first.runs[0].conversation == "lossy"
    assert second.runs[0].conversation == "n-gram"


def test_a_draft_vocabulary_of_its_own(
    plan: Plan, small_models: dict[str, Path], tmp_path: Path
) -> None:
    path = eagle3(tmp_path / "draft", small_models["llama"], draft_vocab=100)
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=str(path), num_steps=3)
    report, _, _ = bench(plan, settings=(Setting("eagle", spec),))
    [result] = report.settings
    assert result.error is None
    assert result.draft_vocabulary == 100
    assert result.draft is not None
    assert set(result.draft) == {"path", "weights_sha256", "config_sha256"}
    summary = result.runs[0].summary
    assert summary.outside_vocabulary is not None
    assert 0.2 < summary.outside_vocabulary <= 1.0
    assert summary.endings.outside_vocabulary > 0
    # A random draft: what falls, falls at the first position or the second.
    assert summary.endings.outside_vocabulary == sum(one.misses for one in summary.positions)


def test_sampled_drafts_say_how_sure_they_are(
    plan: Plan, small_models: dict[str, Path], tmp_path: Path
) -> None:
    path = eagle3(tmp_path / "draft", small_models["llama"])
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=str(path), draft_sampling=True)
    chain = Setting("chain", replace(spec, num_steps=3))
    tree = Setting("tree", replace(spec, num_steps=2, eagle_topk=2, num_draft_tokens=6))
    report, _, _ = bench(plan, settings=(NGRAM, chain, tree), temperatures=(1.0,))
    assert [setting.error for setting in report.settings] == [None] * 3
    for setting in report.settings[1:]:
        found = setting.runs[0].summary.calibration
        assert found is not None
        drafted = setting.runs[0].summary.drafted_per_round
        assert found.nodes <= round(drafted * setting.runs[0].summary.overall.rounds)
        assert found.nodes > 0
        assert setting.runs[0].conversation == "n-gram"


def test_requests_that_do_not_fit_are_named(plan: Plan, prompts: PromptSet, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"id": "long", "turns": ["z" * 600]}) + "\n")
    sets = (prompts, *find_prompt_sets([str(path)], None))
    report, _, _ = bench(plan, settings=(NGRAM,), sets=sets)
    [run] = report.settings[0].runs
    assert run.answers == 5
    [why] = run.skipped
    assert why.startswith("prompt long, turn 1: ")
    assert [group.label for group in run.summary.by_set] == ["few"]


def test_answers_that_memory_cuts_short_are_named(plan: Plan) -> None:
    model = replace(plan.config.model, context_length=100)
    config = replace(plan.config, model=model, memory=MemoryConfig(max_total_tokens=70))
    report, _, _ = bench(plan, settings=(NGRAM,), config=config)
    [run] = report.settings[0].runs
    assert any("the KV memory holds 70" in why for why in run.skipped), run.skipped


def test_speed_beside_plain_decoding(plan: Plan) -> None:
    report, watched, _ = bench(
        plan, settings=(NGRAM,), max_new_tokens=4, speed=SpeedPlan(batch_size=2, repeats=2)
    )
    speed = report.settings[0].speed
    assert speed is not None
    assert (speed.batch_size, speed.prompts) == (2, 8)
    assert speed.tokens <= 8 * 4
    assert 1.0 <= speed.tau <= 4.0
    assert len(speed.setting) == len(speed.plain) == len(speed.ratios) == 2
    assert min(speed.ratios) <= speed.ratio <= max(speed.ratios)
    assert watched.started[-1] == ("speed beside plain decoding", 2 * 3 * 8)
    assert watched.answers == 5 + 2 * 3 * 8


def test_recorders_leave_with_the_run(plan: Plan, prompts: PromptSet) -> None:
    made = AcceptBench(plan, Watched())
    engine = made._engine(NGRAM.spec)
    sampling = Sampling(0.0, 8, seed=3)
    first = measure(engine, made.script, sampling, None, lambda tokens: None)
    assert engine.host_round.recorders == []
    assert draft_vocabulary(engine.drafter, 320) is None
    again = measure(engine, made.script, sampling, first.replies, lambda tokens: None)
    assert again.answers == first.answers
    assert again.table.emitted.tolist() == first.table.emitted.tolist()
