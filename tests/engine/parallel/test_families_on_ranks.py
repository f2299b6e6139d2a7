"""Every family gives on two ranks what it gives on one, or is refused where heads are too few."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from specengine import SamplingParams, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.parallel import Link, split_over
from specengine.core.registry import MODEL_FAMILIES, load_place
from tests.halves import slow_but
from tests.support.families import FAMILIES, save_small_model, small_config
from tests.support.pretended_ranks import PretendedRanks
from tests.support.quantised import FORMATS, quantise_model
from tests.support.ranks import Group, same_on_all

PROMPTS = [[5, 9, 7, 33, 2], [8, 8, 4]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("family", ["llama", "deepseekv3", "qwen3next"])
def test_family_of_fewer_heads_than_ranks_is_refused(family: str) -> None:
    model = load_place(MODEL_FAMILIES[FAMILIES[family]])
    with split_over(PretendedRanks(64)), pytest.raises(ConfigError, match=r"--tp-size 64: .* head"):
        model(small_config(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_the_same_on_two_ranks(
    family: str, link: Link, small_models: dict[str, Path]
) -> None:
    group = Group(str(small_models[family]), 2, link)
    same_on_all(group.pair(None), PROMPTS, GREEDY)


# Experts, sinks with biases, norms over all heads. Latent attention and recurrent state
# are in the test of drafts on two ranks.
FEW = ["qwen3moe", "gptoss", "olmo2"]


@pytest.mark.parametrize("family", FEW)
def test_family_with_layers_of_its_own_is_the_same_on_two_ranks(
    family: str, link: Link, small_models: dict[str, Path]
) -> None:
    group = Group(str(small_models[family]), 2, link)
    same_on_all(group.pair(None), PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("family", "where"),
    slow_but(
        [("deepseekv3", "device"), ("qwen3next", "device")],
        product(["deepseekv3", "qwen3next"], ["host", "device"]),
    ),
)
def test_drafts_of_latent_heads_and_of_recurrent_state_on_two_ranks(
    family: str, where: str, link: Link, small_models: dict[str, Path]
) -> None:
    """In chunks, with what the cache keeps, and of trees."""
    group = Group(str(small_models[family]), 2, link, chunked_prefill_size=16)
    spec = SpecConfig(
        algorithm="NGRAM", adaptive=False, num_draft_tokens=6, ngram_min_match=1, ngram_branches=2
    )
    pair, long = group.pair(spec, where), [8, 8, 4, 9] * 10
    prompts = [[*long, 7], [*long, 5, 8, 8]]
    sampled = SamplingParams(max_tokens=10, temperature=0.8, seed=3, ignore_eos=True)
    for params in (GREEDY, sampled):
        found = same_on_all(pair, prompts, params)
    assert any(drafted for *_, drafted, _ in found)


QUANTISED = [
    ("gptq", "llama"),
    ("fp8 blocks", "llama"),
    ("compressed fp8 rows", "qwen3_5"),
    ("awq", "gptneox"),
]


@pytest.mark.parametrize(("name", "family"), QUANTISED)
def test_quantised_checkpoint_is_the_same_on_two_ranks(
    name: str, family: str, link: Link, small_models: dict[str, Path], tmp_path: Path
) -> None:
    source = save_small_model(family, tmp_path / "source", 3, intermediate_size=128)
    for path in small_models[family].glob("*token*"):
        (source / path.name).write_bytes(path.read_bytes())
    folder = quantise_model(source, tmp_path / "made", FORMATS[name]).quantised
    same_on_all(Group(str(folder), 2, link).pair(None), PROMPTS, GREEDY)
