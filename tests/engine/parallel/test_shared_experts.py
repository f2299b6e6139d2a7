"""Engines on threads that share experts: each says what it says alone, whichever others idle."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import FileStore

from specengine import SamplingParams, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.errors import ConfigError, ModelLoadError
from specengine.core.grammar import GrammarSpec
from specengine.core.parallel import Communicator, communicator
from specengine.core.request import Req
from specengine.core.sharing import ExpertSharers
from specengine.core.spec_stats import DepthChoice
from specengine.engine.llm import LLM
from specengine.engine.loop import Engine
from specengine.runner.communicators.torch_distributed import TorchCommunicator
from tests.halves import slow_but
from tests.support.pretended_ranks import on_threads
from tests.support.ranks import SMALL
from tests.support.shared_experts import (
    NGRAM,
    PARAMS,
    PROMPTS,
    SPECS,
    Plan,
    Said,
    alone,
    make,
    run_on_device,
    run_plan,
)

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def together(
    folder: Path,
    spec: SpecConfig | None,
    patterns: list[list[Plan]],
    where: str = "host",
    meeting: Path | None = None,
    num_steps: int = 30,
) -> list[list[tuple[Said, int]]]:
    """[rank][pattern]: what a rank says, and how many IDLE forwards it runs. where: rounds run on
    the "host" or on the "device". meeting: an empty folder; ranks meet by Gloo then. num_steps: of
    each pattern."""

    def run() -> list[tuple[Said, int]]:
        ranks: Communicator = communicator()
        if meeting is not None:
            store = FileStore(str(meeting / "store"), ranks.size)
            ranks = TorchCommunicator(store, ranks.rank, ranks.size, torch.device("cpu"))
        sharers = ExpertSharers(ranks)
        engine, found = make(folder, spec, sharers), []
        if where == "device":
            run_on_device(engine)
        for plans in patterns:
            before = sharers.num_idle
            said = run_plan(engine, plans[ranks.rank], num_steps)
            found.append((said, sharers.num_idle - before))
        return found

    return on_threads(len(patterns[0]), run)


@pytest.fixture(scope="module")
def said_alone(small_models: dict[str, Path]) -> Callable[[SpecConfig | None], Said]:
    """What an engine says that shares nothing."""
    return cache(lambda spec: alone(small_models["qwen3moe"], spec))


# Which of three ranks are busy. The first alone, and all but it, are among the few.
EVERY = [*product([False, True], repeat=3)]
FEW = [(False,) * 3, (True, False, False), (False, False, True), (False, True, True), (True,) * 3]
WHOLE = pytest.mark.slow


@pytest.mark.parametrize(
    ("spec", "where", "busy"),
    [
        pytest.param(None, "host", FEW, id="plain"),
        pytest.param(None, "device", FEW[1::2], id="device rounds"),
        pytest.param(None, "host", EVERY, id="plain, every pattern", marks=WHOLE),
        pytest.param(NGRAM, "host", EVERY[1:-1], id="ngram, every pattern", marks=WHOLE),
        pytest.param(None, "device", EVERY[1:-1], id="device rounds, every pattern", marks=WHOLE),
    ],
)
def test_any_of_three_ranks_may_be_idle(
    spec: SpecConfig | None,
    where: str,
    busy: list[tuple[bool, ...]],
    small_models: Any,
    said_alone: Callable[[SpecConfig | None], Said],
    tmp_path: Path,
) -> None:
    """Patterns of busy and idle, and ranks that begin later. Of drafts and of rounds on the device
    those where some idle, a rank alone or not."""
    folder, expected = small_models["qwen3moe"], said_alone(spec)
    patterns = [
        [[(rank, 2 * rank)] if is_busy else [] for rank, is_busy in enumerate(one)] for one in busy
    ]
    found_by_rank = together(folder, spec, patterns, where, tmp_path, num_steps=16)
    for rank, found in enumerate(found_by_rank):
        for one, (said, num_idle) in zip(busy, found, strict=True):
            assert said == ({rank: expected[rank]} if one[rank] else {})
            if sum(one) == one[rank]:
                assert num_idle == 0, "no other rank runs a forward"
            elif not one[rank]:
                assert num_idle > 0


# Chains of MTP are in the tests below, on the host in pieces and on the device.
@pytest.mark.parametrize(
    ("name", "where"),
    slow_but([("eagle3", "host"), ("tree", "device")], product(SPECS, ["host", "device"])),
)
def test_drafters_of_ranks_that_share_experts(
    name: str, where: str, deeper: Path, small_models: dict[str, Path]
) -> None:
    """Sampled requests beside greedy ones: on the device, graphs that one rank lacks."""
    folder, spec = small_models["qwen3moe"] if name == "mtp" else deeper, SPECS[name]
    expected = alone(folder, spec)
    plans: list[Plan] = [[(0, 0), (1, 3), (2, 3)], [], [(3, 5), (4, 5), (5, 6)]]
    ranks = together(folder, spec, [plans], where)
    for plan, [(found, num_idle)] in zip(plans, ranks, strict=True):
        assert found == {number: expected[number] for number, _ in plan}
        assert num_idle > 0


def test_ranks_ask_for_rounds_of_different_depth(
    small_models: dict[str, Path], said_alone: Callable[[SpecConfig | None], Said]
) -> None:
    """All take the deepest, and each request has its own text all the same."""
    folder, spec = small_models["qwen3moe"], SPECS["mtp"]
    expected = said_alone(spec)
    plans: list[Plan] = [[(0, 0), (1, 4)], [(2, 1), (3, 2), (4, 3)]]

    def run() -> tuple[Said, set[tuple[int, int]]]:
        ranks = communicator()
        engine = make(folder, spec, ExpertSharers(ranks))
        run_on_device(engine, chooses=True)
        assert engine.pipeline is not None
        rounds, draws = engine.pipeline.executor, random.Random(ranks.rank)

        def choose(reqs: list[Req]) -> tuple[DepthChoice, bool]:
            return DepthChoice(draws.choice(rounds.steps), "at random", None), False

        engine.pipeline.depths.choose = choose  # type: ignore[method-assign]
        said = run_plan(engine, plans[ranks.rank], num_steps=50)
        return said, {(key.batch_size, key.num_steps) for key in rounds.captured}

    (one, shapes), (two, others) = on_threads(2, run)
    assert one | two == {number: expected[number] for number in range(5)}
    assert shapes == others
    assert len({steps for _, steps in shapes}) > 2


def test_engines_that_share_experts_run_in_pieces(
    small_models: Any, said_alone: Callable[[SpecConfig | None], Said]
) -> None:
    """Of different sizes at once, and beside an engine that has nothing to run."""
    folder, spec = small_models["qwen3moe"], SPECS["mtp"]
    expected = said_alone(spec)
    plans: list[Plan] = [[(0, 0), (1, 3), (2, 3)], [], [(3, 5), (4, 5), (5, 6)]]
    sizes: dict[str, Any] = {
        "cuda_graph_mode": "piecewise",
        "piecewise_cuda_graph_tokens": (3, 8),
    }

    def run() -> Said:
        ranks = communicator()
        engine = make(folder, spec, ExpertSharers(ranks), **sizes)
        said = run_plan(engine, plans[ranks.rank])
        assert bool(engine.stats().graphs["piecewise"].replays) == bool(plans[ranks.rank])
        return said

    for plan, said in zip(plans, on_threads(3, run), strict=True):
        assert said == {number: expected[number] for number, _ in plan}
    sizes |= {"piecewise_splitting_ops": ("attention",)}
    with pytest.raises(ConfigError, match="add shared_experts"):
        on_threads(1, lambda: make(folder, spec, ExpertSharers(communicator()), **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2moe", "glm4moe", "gptoss", "qwen3next", "deepseekv3"]
)
def test_families_share_experts(family: str, small_models: Any) -> None:
    folder = small_models[family]
    expected = alone(folder, NGRAM)
    plans = [[(0, 0), (1, 3), (2, 3)], [], [(3, 5), (4, 5), (5, 6)]]
    for plan, [(found, _)] in zip(plans, together(folder, NGRAM, [plans]), strict=True):
        assert found == {number: expected[number] for number, _ in plan}


def test_what_cannot_share_experts_is_refused(small_models: Any) -> None:
    dense = small_models["llama"]
    with pytest.raises(ConfigError, match="the model has none"):
        on_threads(2, lambda: make(dense, None, ExpertSharers(communicator())))
    with pytest.raises(ConfigError, match="--dp-size is for `serve`"):
        LLM("tiny", dp_size=2, **SMALL)
    with pytest.raises(ConfigError, match="needs a --dp-size of 2"):
        config_from_flags({"enable_dp_attention": True})


@pytest.mark.parametrize("where", ["host", "device"])
def test_engines_that_share_experts_take_new_weights_together(
    where: str,
    small_models: Any,
    said_alone: Callable[[SpecConfig | None], Said],
    tmp_path: Path,
) -> None:
    """Asked one after the other, amid requests of both; afterwards each answers as a new engine."""
    folder, other = small_models["qwen3moe"], tmp_path / "other"
    shutil.copytree(folder, other)
    (weights,) = other.glob("*.safetensors")
    makes = torch.Generator().manual_seed(1)
    noisy = {
        name: one + 0.5 * one.std() * torch.randn(one.shape, generator=makes)
        for name, one in load_file(weights).items()
    }
    save_file(noisy, weights)
    expected, before = alone(other, None), said_alone(None)
    assert expected[0] != before[0]

    def run() -> list[Any]:
        ranks = communicator()
        engine = make(folder, None, ExpertSharers(ranks))
        if where == "device":
            run_on_device(engine)
        engine.add_request("amid", PROMPTS[ranks.rank], PARAMS[0])
        for _ in range(3 + 2 * ranks.rank):  # the other goes on meanwhile
            engine.step()
        found: list[Any] = [engine.update_weights(str(other)) > 0]
        for _ in range(10 - 2 * ranks.rank):
            engine.step()
        found.append(run_plan(engine, [(ranks.rank, 0)]))
        with pytest.raises(ConfigError, match="different things at once"):
            engine.update_weights(str(tmp_path) if ranks.rank else str(folder))
        with pytest.raises(ModelLoadError):
            engine.update_weights(str(tmp_path))
        return found

    for rank, (was_forgotten, said) in enumerate(on_threads(2, run)):
        assert was_forgotten
        assert said[rank] == expected[rank]


WANTED = [
    SamplingParams(max_tokens=10, temperature=0, grammar=GrammarSpec.regex("[a-z ]+[.]")),
    SamplingParams(max_tokens=8, temperature=0.7, seed=3, repetition_penalty=1.3, n=2),
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0, logprobs=2, logit_bias={300: 4.0}),
]


def run_wanted(engine: Engine, numbers: list[int]) -> dict[tuple[str, int], list[int]]:
    """One after the other, three steps apart; all ranks step as often."""
    found: dict[tuple[str, int], list[int]] = {}
    for step in range(60):
        if not step % 3 and step // 3 < len(numbers):
            number = numbers[step // 3]
            engine.add_request(str(number), PROMPTS[number % 3], WANTED[number])
        for output in engine.step():
            found[output.rid, output.index] = output.token_ids
    assert not engine.has_work
    return found


def test_grammars_edits_and_logprobs_of_one_rank_beside_the_other(
    small_models: dict[str, Path],
) -> None:
    """A round of three graphs beside one of one; what requests ask for is each rank's own."""
    folder, spec = small_models["qwen3moe"], SPECS["mtp"]
    expected = run_wanted(make(folder, spec, None), [0, 1, 2, 3])

    def run() -> dict[tuple[str, int], list[int]]:
        ranks = communicator()
        engine = make(folder, spec, ExpertSharers(ranks))
        run_on_device(engine)
        assert engine.pipeline is not None
        found = run_wanted(engine, [[0, 3], [2, 1]][ranks.rank])
        kinds = {key.sampling for key in engine.pipeline.executor.captured}
        assert any(one.masks for one in kinds)
        assert any(one.edits and not one.masks for one in kinds)
        return found

    one, two = on_threads(2, run)
    assert one | two == expected
