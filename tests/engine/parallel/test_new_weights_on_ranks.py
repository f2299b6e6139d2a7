"""Other weights on two ranks: each reads its own parts, and all take them or none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import SamplingParams, SpecConfig
from specengine.core.errors import ModelLoadError
from specengine.core.parallel import Link
from specengine.engine.loop import Engine
from tests.support.ranks import Group, same_on_all

PROMPTS = [[5, 9, 7, 33, 2], [8, 8, 4, 8, 8]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
CHAIN = SpecConfig(algorithm="EAGLE3", num_steps=3, adaptive=False)


@pytest.fixture(scope="module")
def two(link: Link) -> Group:
    return Group("tiny", 2, link)


@pytest.fixture(scope="module")
def other(two: Group, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's checkpoint, every weight with noise."""
    source, target = two.one.source.directory, tmp_path_factory.mktemp("weights") / "other"
    assert source is not None
    target.mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    (weights,) = source.glob("*.safetensors")
    makes = torch.Generator().manual_seed(3)
    tensors = {
        name: one + 0.3 * one.std() * torch.randn(one.shape, generator=makes)
        for name, one in load_file(weights).items()
    }
    save_file(tensors, target / weights.name)
    return target


def cannot_read(engine: Engine, rank: int) -> None:
    """From now on, on one rank."""
    weights = engine.weights
    assert weights is not None
    if engine.parts.link.communicator.rank != rank:
        return

    def fail(model: str | None, draft_model: str | None) -> None:
        raise OSError("no space left on device")

    weights._read = fail  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("where", [pytest.param("host", marks=pytest.mark.slow), "device"])
def test_two_ranks_answer_with_new_weights_as_one_does(where: str, two: Group, other: Path) -> None:
    """In the middle of requests, whose text goes on with the new weights."""
    pair = two.pair(CHAIN, where)
    before = same_on_all(pair, PROMPTS, GREEDY)
    found = []
    for llm in pair:
        llm.engine.add_request("amid", PROMPTS[0], SAMPLED)
        for _ in range(3):
            llm.engine.step()
        assert llm.update_weights(str(other)) > 0
        last = []
        while llm.engine.has_work:
            last += llm.engine.step()
        found.append(last[-1].token_ids)
    assert found[0] == found[1]
    after = same_on_all(pair, PROMPTS, GREEDY)
    assert [one[0] for one in after] != [one[0] for one in before]
    for llm in pair:
        llm.update_weights("tiny")
    assert same_on_all(pair, PROMPTS, GREEDY) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_takes_weights_that_one_cannot_read(rank: int, two: Group, other: Path) -> None:
    pair = two.pair(None)
    before = same_on_all(pair, PROMPTS, GREEDY)
    pair[1].engine.call(f"{__name__}:cannot_read", rank=rank)  # type: ignore[attr-defined]
    with pytest.raises((OSError, ModelLoadError), match="another rank" if rank else "no space"):
        pair[1].update_weights(str(other))
    assert same_on_all(pair, PROMPTS, GREEDY) == before


def test_weights_of_another_shape_are_refused_on_two_ranks(
    two: Group, other: Path, tmp_path: Path
) -> None:
    pair = two.pair(None)
    before = same_on_all(pair, PROMPTS, GREEDY)
    wrong = tmp_path / "wrong"
    shutil.copytree(other, wrong)
    config = json.loads((wrong / "config.json").read_text())
    config["intermediate_size"] += 64
    (wrong / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="intermediate_size"):
        pair[1].update_weights(str(wrong))
    assert same_on_all(pair, PROMPTS, GREEDY) == before
