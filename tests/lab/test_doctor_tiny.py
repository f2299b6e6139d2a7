"""The doctor on a drafter that was really trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from specengine.draft.loaded import draft_directory
from specengine.lab.doctor.diagnose import Examination, diagnose
from specengine.lab.doctor.report import Diagnosis
from tests.lab.doctor_world import config_of

PROMPTS = [
    "What is gravity?",
    "Write a Python function that adds two numbers.",
    "Give me five tips for better sleep.",
    "Write a short poem about the sea.",
]


def examine(draft: Path) -> Diagnosis:
    config = config_of(Path("tiny"), draft)
    examination = Examination(config, PROMPTS, 24, with_reference=False, fixed=None)
    return diagnose(examination, lambda what: None)


def test_it_is_healthy() -> None:
    found = examine(Path("tiny-eagle3"))
    assert (found.status, found.causes) == ("healthy", [])
    assert found.before is not None
    assert found.before.first.value > 0.6


def test_layer_ids_shifted_by_one_are_named(tmp_path: Path) -> None:
    draft = shutil.copytree(draft_directory("tiny-eagle3"), tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [place + 1 for place in ids]
    (draft / "config.json").write_text(json.dumps(config))
    found = examine(draft)
    [cause] = found.causes
    assert (cause.suspect, found.status) == ("layer ids", "cause found")
    assert "outputs of layers [0, 3, 5]" in cause.claim
    assert found.after is not None
    assert found.after.first.value > 0.6
