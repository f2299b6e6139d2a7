"""Training from a configuration to an export that an engine has measured, for every kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specengine.cli.main import main
from specengine.core.errors import ConfigError, DataError
from specengine.draft.train.config import TrainConfig, load_config
from specengine.draft.train.data.dataset import Document
from specengine.draft.train.data.fingerprint import tokenizer_sha256
from specengine.draft.train.data.manifest import TargetIdentity
from specengine.draft.train.data.writer import write_dataset
from specengine.engine.proof.tiny_model import save_tiny_model
from specengine.lab.training import DRAFT_KINDS, config_class, train
from specengine.runner.loader.tokenizer import load_tokenizer
from tests.train.draft_training import load_target, small_task

VOCAB = 300


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a data set in its tokens; another one in other tokens."""
    folder = tmp_path_factory.mktemp("world")
    save_tiny_model(folder / "target", seed=0)
    tokenizer = load_tokenizer(load_target(folder / "target").source)
    rng = np.random.default_rng(0)
    documents = [
        Document(
            rng.integers(2, VOCAB, size=24).astype(np.uint16),
            (np.arange(24) >= 8).astype(np.uint8),
        )
        for _ in range(40)
    ]
    for name, tokens in (("data", tokenizer_sha256(tokenizer)), ("foreign", "f" * 64)):
        identity = TargetIdentity(
            name="lost", weights="", tokenizer=tokens, chat_template="", vocab_size=VOCAB
        )
        write_dataset(folder / name, documents, identity)
    return folder


def config_of(kind: str, world: Path, output: Path, *overrides: str) -> TrainConfig:
    settings = {
        "data.path": world / "data",
        "data.target": world / "target",
        "data.batch_tokens": 96,
        "data.held_out": 0.2,
        "schedule.max_steps": 3,
        "run.output": output,
        "run.device": "cpu",
        "run.probe_every": 2,
        "run.probe_prompts": 2,
        "run.probe_tokens": 8,
        "run.probe_steps": 2,
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    small = small_task(kind, 64)
    return load_config(config_class(kind), None, [*given, *small, *overrides])


@pytest.mark.parametrize("kind", list(DRAFT_KINDS))
def test_drafters_are_trained_and_measured(tmp_path: Path, world: Path, kind: str) -> None:
    outcome = train(kind, config_of(kind, world, tmp_path / "run"))
    assert (outcome.step, outcome.stopped_by) == (3, 0)
    assert outcome.held_out["loss"] > 0
    assert 1.0 <= outcome.probe["accepted_length"] <= 3.0
    assert 0.0 <= outcome.probe["acceptance_0"] <= 1.0
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert log.count('"probe"') == 2  # after step 2, and at the end
    assert log.count('"held_out"') == 2  # before the first step, and at the end


def test_a_target_that_is_not_found_is_to_be_named(tmp_path: Path, world: Path) -> None:
    config = config_of("eagle3", world, tmp_path / "run", "data.target=none")
    with pytest.raises(ConfigError, match=r"model called lost, which is not found.*data\.target"):
        train("eagle3", config)


def test_data_of_another_tokenizer_are_refused(tmp_path: Path, world: Path) -> None:
    config = config_of("mtp", world, tmp_path / "run", f"data.path={world / 'foreign'}")
    with pytest.raises(DataError, match="tokenized by another tokenizer"):
        train("mtp", config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eagle3", "tiny-eagle3", "data.path="], "no data: name data.path"),
        (["eagel3", "tiny-eagle3"], "cannot train 'eagel3'; did you mean eagle3?"),
        (["target", "tiny-traget"], "did you mean tiny-target?"),
        (["target", "tiny-target", "task.text=none", "run.device=cpu"], "no data: name task.text"),
        (["mtp", "tiny-mtp", "task.draft_vocab_size=9"], "key task.draft_vocab_size is not known"),
    ],
)
def test_the_command_refuses(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_prints_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "eagle3", "tiny-eagle3", "run.seed=5", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "  seed: 5  # of initial weights" in printed
    assert "  own_head: false" in printed
