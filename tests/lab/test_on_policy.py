"""A drafter that trains on what its engine answers, and takes its place there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specengine import LLM, SamplingParams
from specengine.core.config_sources import config_from_flags
from specengine.core.errors import ConfigError
from specengine.draft.train.config import TrainConfig, load_config
from specengine.draft.train.data.dataset import Document, TokenDataset
from specengine.draft.train.data.writer import write_dataset
from specengine.draft.train.eagle3_task import Eagle3Config, make_eagle3_task
from specengine.draft.zoo.shipped import SHIPPED_DRAFTERS
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.lab.generate.make import identify
from specengine.lab.training import DRAFT_KINDS, config_class, train
from specengine.runner.loader.loaded_model import LoadedModel
from tests.halves import slow_but
from tests.train.draft_training import small_task

QUESTIONS = ["Hello! Who are you?", "Count from one to ten.", "What is the capital of France?"]
EAGLE = Path(str(SHIPPED_DRAFTERS["tiny-eagle3"].directory))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(config_from_flags({"model": "tiny", "device": "cpu"}), Phases())


@pytest.fixture(scope="module")
def data(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the tiny target, a few times."""
    llm = LLM("tiny", device="cpu", max_total_tokens=2048)
    params = [
        SamplingParams(max_tokens=24, temperature=0.8, seed=seed, ignore_eos=True)
        for seed in range(15)
    ]
    documents = []
    for one in llm.generate(QUESTIONS * 5, params):
        tokens = [*one.prompt_ids, *one.token_ids]
        loss = np.arange(len(tokens)) >= len(one.prompt_ids)
        documents.append(Document(np.array(tokens, np.uint16), loss.astype(np.uint8)))
    folder = tmp_path_factory.mktemp("data") / "tiny"
    write_dataset(folder, documents, identify(loaded))
    return folder


def config_of(kind: str, data: Path, output: Path, *overrides: str) -> TrainConfig:
    settings = {
        "data.path": data,
        "data.target": "tiny",
        "data.batch_tokens": 128,
        "data.held_out": 0.3,
        "schedule.max_steps": 3,
        "run.output": output,
        "run.device": "cpu",
        "run.probe_prompts": 2,
        "run.probe_tokens": 8,
        "run.probe_steps": 2,
        "run.on_policy_rounds": 2,
        "run.on_policy_prompts": 4,
        "run.on_policy_tokens": 8,
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    small = small_task(kind, 256)
    return load_config(config_class(kind), None, [*given, *small, *overrides])


# The tests below train EAGLE-3's; tests/lab/test_training_run.py trains and measures each kind.
@pytest.mark.parametrize("kind", slow_but(["dflash", "standalone"], DRAFT_KINDS))
def test_each_round_is_measured_in_one_engine(kind: str, data: Path, tmp_path: Path) -> None:
    outcome = train(kind, config_of(kind, data, tmp_path))
    assert list(outcome.probe) == ["accepted_length_0", "accepted_length_1", "accepted_length_2"]
    assert all(1.0 <= value <= 3.0 for value in outcome.probe.values())
    for number in (1, 2):
        answers = TokenDataset(tmp_path / f"round-{number}" / "data")
        assert len(answers) == 4
        assert all(0 < one.loss.sum() <= 8 for one in answers.documents)
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_answers_are_the_targets_own(data: Path, tmp_path: Path) -> None:
    """At temperature 0: whatever the drafter is, and from the first round to the last."""
    train("eagle3", config_of("eagle3", data, tmp_path, "run.on_policy_temperature=0"))
    plain = LLM("tiny", device="cpu", max_total_tokens=2048)
    for number in (1, 2):
        for one in TokenDataset(tmp_path / f"round-{number}" / "data").documents:
            start = int(np.flatnonzero(one.loss)[0])
            answer = one.tokens[start:].tolist()
            params = SamplingParams(max_tokens=len(answer), temperature=0)
            assert plain.generate([one.tokens[:start].tolist()], params)[0].token_ids == answer


def test_training_goes_on_from_a_drafter_that_exists(data: Path, tmp_path: Path) -> None:
    """Where it learns nothing, the engine accepts as much of it as before."""
    config = config_of("eagle3", data, tmp_path, "task.init=tiny-eagle3", "optimiser.lr=1e-9")
    lengths = [*train("eagle3", config).probe.values()]
    assert lengths[0] == lengths[1] == lengths[2] > 1.5


def test_drafter_is_exported_as_it_was_given(
    data: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    config = Eagle3Config(init="tiny-eagle3")
    task = make_eagle3_task(loaded, TokenDataset(data), config)
    task.export(tmp_path)
    ours, theirs = (load_file(one / "model.safetensors") for one in (tmp_path, EAGLE))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=1e-2, atol=1e-6)
    configs = [json.loads((one / "config.json").read_text()) for one in (tmp_path, EAGLE)]
    assert configs[0]["eagle_config"] == configs[1]["eagle_config"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.intermediate_size=64", "task.intermediate_size=64, and 512"),
        ("run.resume=true", "resume"),
    ],
)
def test_what_does_not_fit_is_refused(
    data: Path, tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train("eagle3", config_of("eagle3", data, tmp_path, "task.init=tiny-eagle3", override))


def test_target_has_no_engine_to_learn_from(tmp_path: Path) -> None:
    config = load_config(config_class("target"), None, ["run.on_policy_rounds=1"])
    with pytest.raises(ConfigError, match="is for drafters"):
        train("target", config)
