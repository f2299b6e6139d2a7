"""The doctor on targets whose configurations are not a Llama's."""

from __future__ import annotations

from pathlib import Path

import pytest

from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.lab.doctor.diagnose import Examination, diagnose
from specengine.lab.doctor.examined_drafter import read_drafter
from specengine.lab.doctor.features import compare_features
from specengine.lab.doctor.hypotheses.attention import rope_hypotheses
from tests.draft import eagle_checkpoints as checkpoints
from tests.lab import doctor_world as world


@pytest.mark.parametrize("family", ["gptneox", "gemma3"])
def test_features_agree_with_transformers(family: str, small_models: dict[str, Path]) -> None:
    folder = small_models[family]
    loaded, texts = load(world.config_of(folder), Phases()), world.texts_of(folder)
    found = compare_features(loaded, texts[:1])
    assert isinstance(found, list)
    assert min(match.lowest for match in found) > 0.9999


@pytest.mark.parametrize("family", ["gemma3", "olmo3", "glm4", "qwen3next"])
def test_a_draft_of_random_weights_is_examined_whole(
    family: str, small_models: dict[str, Path], tmp_path: Path
) -> None:
    target, draft = small_models[family], tmp_path / "draft"
    checkpoints.eagle3(draft, target)
    config = world.config_of(target, draft)
    examination = Examination(config, ["abc", "hello"], 20, with_reference=False)
    found = diagnose(examination, lambda what: None)
    assert found.before is not None
    assert found.status != "healthy"
    assert len(found.tried) > 10


def test_each_rotary_table_of_a_target_is_tried(
    small_models: dict[str, Path], tmp_path: Path
) -> None:
    target, draft = small_models["gemma3"], tmp_path / "draft"
    checkpoints.eagle3(draft, target)
    loaded = load(world.config_of(target), Phases())
    drafter = read_drafter("EAGLE3", loaded, str(draft))
    found = {one.suspect: one.edit for one in rope_hypotheses(drafter, drafter.files)}
    tables = loaded.source.hf_config.rope_parameters
    assert len(found) == len(tables) == 2
    for kind, table in tables.items():
        edit = found[f"rotary frequencies of its {kind} layers"]
        assert edit is not None
        edited = edit(drafter.files).layer_section
        assert (edited["rope_parameters"], edited["rope_theta"]) == (table, None)
