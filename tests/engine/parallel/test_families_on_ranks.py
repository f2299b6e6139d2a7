"""Every family gives on two ranks what it gives on one, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import SamplingParams
from specengine.core.config_sources import config_from_flags
from specengine.core.errors import ConfigError
from specengine.core.parallel import Link, split_over
from specengine.engine.parallel.ranks import start_ranks
from specengine.engine.phases import Phases
from specengine.runner.loader import load as loader
from specengine.runner.loader.model_source import ModelSource
from specengine.target.registry import find_model_class
from tests.support.families import FAMILIES, small_config
from tests.support.pretended_ranks import PretendedRanks
from tests.support.ranks import SMALL, Group, same_on_all

PROMPTS = [[5, 9, 7, 33, 2], [8, 8, 4]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    found: Any = start_ranks(config_from_flags({**SMALL, "tp_size": 2}), Phases())
    yield found
    found.watch.end()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_the_same_on_two_ranks(
    family: str, link: Link, small_models: dict[str, Path]
) -> None:
    group = Group(str(small_models[family]), 2, link)
    same_on_all(group.pair(None), PROMPTS, GREEDY)


FEW = ["qwen3moe", "gptoss", "olmo2"]  # experts, sinks with biases, norms over all heads


@pytest.mark.parametrize("family", FEW)
def test_family_with_experts_sinks_or_wide_norms_is_the_same_on_two_ranks(
    family: str, link: Link, small_models: dict[str, Path]
) -> None:
    group = Group(str(small_models[family]), 2, link)
    same_on_all(group.pair(None), PROMPTS, GREEDY)


def test_quantised_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "quantization_of", lambda *_: object())
    source = ModelSource("four-bit", small_config("llama"))
    with split_over(PretendedRanks(2)), pytest.raises(ConfigError, match="four-bit is quantised"):
        loader.load_model(source, find_model_class, torch.float32, torch.device("cpu"))
