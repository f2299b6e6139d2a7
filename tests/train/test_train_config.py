"""Configurations of training runs: files, overrides, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from specengine.core.errors import ConfigError
from specengine.draft.train.config import ScheduleConfig, load_config, to_yaml
from specengine.draft.train.optimiser import lr_factor
from specengine.draft.train.recipes_folder import RECIPES, find_recipe
from specengine.draft.train.target import TargetConfig
from specengine.lab.training import config_class


def test_overrides_stand_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("task: {hidden_size: 128}\noptimiser: {lr: 1e-3, name: muon}\n")
    config = load_config(TargetConfig, file, ["optimiser.lr=2e-3", "task.init=none"])
    task = config.task
    assert isinstance(task, TargetConfig)
    assert (task.hidden_size, task.init) == (128, None)
    assert (config.optimiser.lr, config.optimiser.name) == (2e-3, "muon")


def test_what_is_printed_gives_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(TargetConfig, None, ["run.output=x", "task.text=a b", "run.max_minutes=3"])
    (tmp_path / "printed.yaml").write_text(to_yaml(config))
    assert load_config(TargetConfig, tmp_path / "printed.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=1", r"section optimizer is not known; did you mean optimiser\?"),
        ("optimiser.lrr=1", r"key optimiser\.lrr is not known; did you mean lr\?"),
        ("optimiser.lr", "is no override; write section.key=value"),
        ("optimiser.lr=fast", r"optimiser\.lr must be a number, got 'fast'"),
        ("optimiser.lr=0", r"optimiser\.lr=0\.0: must be above 0"),
        ("task.num_heads=3", r"task\.num_heads=3: must cut hidden_size"),
        ("schedule.final_lr=2", r"schedule\.final_lr=2\.0: is a share of lr"),
    ],
)
def test_refusals_name_the_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TargetConfig, None, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {ouput: x}", r"key run\.ouput is not known; did you mean output\?"),
        ("- 1", "must hold sections: task, data"),
        ("run: 3", "run must hold one `key: value` a line"),
        ("run: [", "cannot read the configuration"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(TargetConfig, file)


def test_unknown_recipes_and_kinds_are_guessed() -> None:
    with pytest.raises(ConfigError, match=r"did you mean tiny-target\? recipes are "):
        find_recipe("tiny-targt")
    with pytest.raises(ConfigError, match=r"cannot train 'eagle'; did you mean eagle3\?"):
        config_class("eagle")


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_fit_their_task(recipe: Path) -> None:
    kind = recipe.stem.rpartition("-")[2]
    assert load_config(config_class(kind), recipe).run.output


def test_the_learning_rate_rises_and_falls() -> None:
    config = ScheduleConfig(max_steps=100, warmup_steps=10, final_lr=0.1)
    assert lr_factor(config, 0, 0.0) == pytest.approx(0.1)
    assert lr_factor(config, 9, 0.0) == pytest.approx(1.0)
    assert lr_factor(config, 50, 0.5) == pytest.approx(0.55)
    assert lr_factor(config, 99, 1.0) == pytest.approx(0.1)
    assert lr_factor(config, 20, 1.0) == pytest.approx(0.1)  # by the clock
