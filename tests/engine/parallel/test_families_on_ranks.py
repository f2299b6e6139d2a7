"""Every family gives on two ranks what it gives on one, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specengine import SamplingParams
from specengine.core.config_sources import config_from_flags
from specengine.core.errors import ConfigError
from specengine.core.parallel import Link, split_over
from specengine.core.registry import MODEL_FAMILIES, load_place
from specengine.engine.parallel.ranks import start_ranks
from specengine.engine.phases import Phases
from tests.support.families import FAMILIES, save_small_model, small_config
from tests.support.pretended_ranks import PretendedRanks
from tests.support.quantised import FORMATS, quantise_model
from tests.support.ranks import SMALL, Group, same_on_all

PROMPTS = [[5, 9, 7, 33, 2], [8, 8, 4]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    found: Any = start_ranks(config_from_flags({**SMALL, "tp_size": 2}), Phases())
    yield found
    found.watch.end()


def is_refused(family: str) -> bool:
    model = load_place(MODEL_FAMILIES[FAMILIES[family]])
    specs = model.layer_specs(small_config(family))
    return any(one.gated_delta or one.attention_gate or one.latent for one in specs)


SPLIT = [family for family in FAMILIES if not is_refused(family)]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SPLIT])
def test_family_with_what_is_not_split_is_refused(family: str) -> None:
    model = load_place(MODEL_FAMILIES[FAMILIES[family]])
    with (
        split_over(PretendedRanks(2)),
        pytest.raises(ConfigError, match=r"--tp-size 2: .* not split"),
    ):
        model(small_config(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", SPLIT)
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


@pytest.mark.parametrize("name", ["gptq", "fp8 blocks"])
def test_quantised_checkpoint_is_the_same_on_two_ranks(
    name: str, link: Link, small_models: dict[str, Path], tmp_path: Path
) -> None:
    source = save_small_model("llama", tmp_path / "source", 3, intermediate_size=128)
    for path in small_models["llama"].glob("*token*"):
        (source / path.name).write_bytes(path.read_bytes())
    folder = quantise_model(source, tmp_path / "made", FORMATS[name]).quantised
    same_on_all(Group(str(folder), 2, link).pair(None), PROMPTS, GREEDY)
