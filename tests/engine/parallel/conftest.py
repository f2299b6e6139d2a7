"""What tests of ranks share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def one_thread_a_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deeper(small_models: Any, tmp_path: Path) -> Path:
    """Of as many layers as EAGLE-3's features want, without weights."""
    for path in small_models["qwen3moe"].glob("*.json"):
        config = json.loads(path.read_text())
        if path.name == "config.json":
            config["num_hidden_layers"] = 7
        (tmp_path / path.name).write_text(json.dumps(config))
    return tmp_path
