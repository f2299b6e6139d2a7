"""What rounds of a mixture of experts read by depth, and the depth that costs make the best."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.peers.chosen_experts import Choices
from benchmarks.step import mixture_costs as bench
from specengine import SpecConfig
from specengine.engine.round.executor import RoundExecutor
from specengine.runner.loader.builtin import BUILTIN_MODELS
from tests.draft.eagle_checkpoints import eagle3
from tests.support.device_rounds import make_eager_rounds, prepare_drafter
from tests.support.rounds import ON_CPU, make

SIZES, STEPS = (1, 4), 3


@pytest.fixture
def rounds(small_models: dict[str, Path], tmp_path: Path) -> RoundExecutor:
    folder = small_models["qwen3moe"]
    draft = eagle3(tmp_path / "draft", folder, draft_vocab=200)
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=str(draft), num_steps=STEPS)
    llm = make(folder, spec, device="cpu")
    prepare_drafter(llm)
    return make_eager_rounds(llm, SIZES, chooses=True)


@ON_CPU
def test_tokens_that_differ_read_more_experts_than_one_token(rounds: RoundExecutor) -> None:
    choices = Choices(rounds.runner.model)
    rows, differ, alike = bench.cost_rows(rounds, choices, {4: {0: 1.0}})
    assert [(row["requests"], row["K"]) for row in rows] == [
        (size, steps) for size in SIZES for steps in rounds.steps
    ]
    assert {*rounds.steps} == {*range(STEPS + 1)}
    found = {(row["requests"], row["K"]): row for row in rows}
    plain = found[4, 0]
    chosen, count = choices.layers[0].spec.num_chosen, choices.layers[0].spec.num_experts
    assert plain["experts read of it"] == chosen, "rows of one token choose alike"
    assert plain["experts read"] > chosen
    assert found[4, 3]["experts read"] > 0.9 * count, "of 16 rows"
    assert found[4, 3]["experts read of it"] < found[4, 3]["experts read"]
    assert found[1, 0]["experts read"] == chosen
    assert (plain["cost table us"], found[1, 0]["cost table us"]) == (1e6, None)
    assert differ[4][3] * 1e6 == found[4, 3]["tokens differ us"]
    assert alike[4][3] * 1e6 == found[4, 3]["one token us"]
    assert not choices.ids
    assert not any("choose" in vars(layer.gate) for layer in choices.layers)
    assert not torch.any(rounds.state.roots)


def test_costs_of_one_token_choose_too_deep() -> None:
    differ = {8: {0: 1.0, 1: 1.6, 2: 2.2, 3: 2.8}}
    alike = {8: {0: 1.0, 1: 1.05, 2: 1.1, 3: 1.15}}
    low, high = bench.choice_rows(differ, alike, (1.3, 3.6))
    tokens = 1 + low["chance of a draft"]
    assert (low["K"], low["K by one token"]) == (0, 1)
    assert low["of plain"] == 1.0
    assert low["that would be, of plain"] == pytest.approx(tokens / 1.6)
    assert low["promised by one token"] == pytest.approx(tokens / 1.05)
    assert low["lost by it"] == pytest.approx(1 - tokens / 1.6)
    assert (high["K"], high["lost by it"]) == (3, 0.0)
    assert high["of plain"] == pytest.approx(3.6 / 2.8)


@pytest.mark.parametrize("length", [1.0, 1.5, 3.0, 4.0])
def test_chance_gives_the_accepted_length(length: float) -> None:
    chance = bench.chance_of(length, 3)
    assert 1 + chance + chance**2 + chance**3 == pytest.approx(length)


def test_shape_of_the_first_layers_has_a_name_meanwhile() -> None:
    with bench.cut_shape("qwen3-30b-a3b-shape", 12) as name:
        cut = BUILTIN_MODELS[name]
        assert cut.config["num_hidden_layers"] == 12
        assert cut.config["num_experts"] == 128
    assert name not in BUILTIN_MODELS
    assert BUILTIN_MODELS["qwen3-30b-a3b-shape"].config["num_hidden_layers"] == 48


def test_model_without_experts_is_refused() -> None:
    with pytest.raises(SystemExit, match="no layer of this model has experts"):
        Choices(torch.nn.Linear(2, 2))
