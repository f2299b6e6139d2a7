from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM
from specengine.cli.main import main
from specengine.core.config import EngineConfig, MemoryConfig, ModelConfig, ServerConfig
from specengine.core.errors import ModelLoadError
from specengine.engine.build import build_engine
from specengine.runner.loader.generation_config import read_sampling_defaults


def write(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_fields_of_sampling_are_read_and_no_others(tmp_path: Path) -> None:
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1}
    others = {"min_p": None, "max_new_tokens": 7, "do_sample": True, "eos_token_id": 3}
    assert read_sampling_defaults(write(tmp_path, **said, **others)) == said


def test_without_the_file_there_are_none(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1.0), ("top_p", "0.9"), ("top_k", 2.5), ("top_p", True)]
)
def test_values_that_no_request_may_have(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"generation_config.json: {name}.*openai"):
        read_sampling_defaults(write(tmp_path, **{name: value}))


@pytest.mark.parametrize(("option", "found"), [("model", {"top_k": 5}), ("openai", {})])
def test_option_says_whether_they_count(
    option: str, found: dict[str, Any], small_models: dict[str, Path], tmp_path: Path
) -> None:
    for one in small_models["llama"].iterdir():
        (tmp_path / one.name).symlink_to(one)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    write(tmp_path, top_k=5)
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), device="cpu"),
        memory=MemoryConfig(max_total_tokens=64),
        server=ServerConfig(sampling_defaults=option),
    )
    assert build_engine(config).parts.sampling_defaults == found


@pytest.fixture
def refused_by_a_server(small_models: dict[str, Path], tmp_path: Path) -> Path:
    for one in small_models["llama"].iterdir():
        (tmp_path / one.name).symlink_to(one)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    return write(tmp_path, top_k=50.0)


def test_offline_engines_do_not_read_them(refused_by_a_server: Path) -> None:
    llm = LLM(str(refused_by_a_server), device="cpu", max_total_tokens=64)
    assert llm.engine.parts.sampling_defaults == {}


def test_commands_that_do_not_serve_do_not_read_them(refused_by_a_server: Path) -> None:
    flags = ["--device", "cpu", "--max-total-tokens", "64", "--max-tokens", "2", "--raw"]
    assert main(["generate", str(refused_by_a_server), "hi", *flags]) == 0
