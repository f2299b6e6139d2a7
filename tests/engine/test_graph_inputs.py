"""Under --debug-cuda-graph no input of a flying round moves without a word, nor does a word come
where none moved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig
from specengine.core.errors import GraphInputError
from specengine.engine.graph_round import GraphRound
from tests.draft.mtp_reading import add_mtp
from tests.support.mtp_targets import predictable
from tests.engine.flying_world import let_fly as let_any_fly
from tests.engine.plain import plain_says
from tests.engine.test_graph_round import EDITED, GREEDY, PROMPTS, SAMPLED, TOLD, make
from tests.engine.test_graph_round import let_fly as allow

ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="graphs are tested where there is a GPU"
)
RULED = [replace(SAMPLED[0], grammar=GrammarSpec.regex("[a-z]{40}")), GREEDY, TOLD[0]]
BATCHES = [[GREEDY] * 3, SAMPLED[:3], EDITED, TOLD, RULED]
CHAIN: dict[str, Any] = {"adaptive": False, "num_steps": 3}
TREE: dict[str, Any] = {"adaptive": False, "num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 8}
SHAPES = {
    "plain": None,
    "NGRAM": {"adaptive": False, "ngram_min_match": 1},
    "EAGLE": CHAIN,
    "EAGLE3": CHAIN,
    "STANDALONE": CHAIN,
    "MTP": CHAIN,
    "a tree": {**TREE, "algorithm": "EAGLE3"},
    "a static tree": {**TREE, "algorithm": "EAGLE", "static_tree": True},
    "a tree of a model": {**TREE, "algorithm": "STANDALONE"},
    "a tree of text": {
        "algorithm": "NGRAM",
        "adaptive": False,
        "ngram_min_match": 1,
        "ngram_branches": 2,
    },
}
# By their paths from the round; of the last attribute, what the error says.
OF_ALL = [
    "rows",
    "state.lens",
    "state.roots",
    "state.outcomes",
    "choices.table.words",
    "choices.edits._tables.bias",
    "choices.edits._tables.slots",
    "logprobs._table",
    "masks._words",
    "masks._slots",
    "runner.pools.req_to_token_pool.req_to_token",
    "runner.pools.token_to_kv_pool._k.1",
    "runner.attn_backend.counters",
    "runner.model.lm_head._meeting.keys",
    "runner._even.first",
]
OF_EAGLE = ["drafter.states", "drafter.first_keys", "drafter.tree_rows.counters"]
OF_DRAFTERS = {
    "plain": [],
    "NGRAM": ["drafter.tokens"],
    "EAGLE": OF_EAGLE,
    "EAGLE3": [*OF_EAGLE, "drafter.runner.pools.token_to_kv_pool._v.0"],
    "STANDALONE": ["drafter.previous", "drafter.runner.model.model.norm.weight"],
    "MTP": [
        "drafter.layer_states",
        "drafter.runners.2.model.final_norm.weight",
        "drafter.runners.1.pools.token_to_kv_pool._k.1",
        "drafter.runners.2._even.first",
    ],
    "a tree": OF_EAGLE,
    "a static tree": [*OF_EAGLE, "drafter.tree_rows.rank_scores"],
    "a tree of a model": ["drafter.previous", "drafter.tree_rows.counters"],
    "a tree of text": ["drafter.nodes"],
}


@pytest.fixture(scope="module")
def with_mtp(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph-inputs-mtp")
    add_mtp(small_models["qwen2"], folder, "mimo", 3)
    return predictable(folder, "mimo", 3, residue=0.2)


def spec_of(name: str, drafters: dict[str, str]) -> SpecConfig | None:
    shape = SHAPES[name]
    if shape is None:
        return None
    given = {"algorithm": name} | shape
    return SpecConfig(draft_model_path=drafters.get(given["algorithm"]), **given)


def let_fly(llm: LLM, monkeypatch: pytest.MonkeyPatch, overlaps: bool = True) -> GraphRound:
    """Guarded."""
    allow(llm)
    if hasattr(llm.engine.drafter, "layer_states"):
        llm.engine.drafter.flies = True
    llm.engine.parts.worker.runner.guards_graphs = True
    return let_any_fly(llm, monkeypatch, overlaps)


def tokens(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS[: len(params)], params)]


@contextmanager
def elsewhere(root: object, path: str) -> Iterator[str]:
    """The tensor at a path lies at another place for a while. Gives its name."""
    *above, last = path.split(".")
    owner: Any = root
    for name in above:
        owner = owner[int(name)] if name.isdigit() else attrgetter(name)(owner)
    if isinstance(owner, dict):
        key = next(iter(owner))
        before, name = owner[key], f"{above[-1]}[{key}]"
        owner[key] = tuple(one.clone() for one in before)
        yield name
        owner[key] = before
    elif isinstance(owner, list):
        before, index = owner[int(last)], int(last)
        owner[index] = before.clone()
        yield f"{above[-1]}[{last}]"
        owner[index] = before
    else:
        before = getattr(owner, last)
        clone = before.detach().clone()
        if isinstance(before, torch.nn.Parameter):
            clone = torch.nn.Parameter(clone, requires_grad=False)
        set_on = setattr if isinstance(owner, torch.nn.Module) else object.__setattr__
        set_on(owner, last, clone)
        yield last
        set_on(owner, last, before)


@pytest.fixture(params=SHAPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, target: Path, with_mtp: Path) -> Path:
    return with_mtp if name == "MTP" else target


@ON_CPU
def test_no_input_moves_without_a_word(
    name: str, folder: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(folder, spec_of(name, drafters), device="cpu")
    flying = let_fly(llm, monkeypatch)
    for params in BATCHES:
        tokens(llm, params)
    guard = flying.guard
    assert guard is not None
    for path in [*OF_ALL, *OF_DRAFTERS[name]]:
        with (
            elsewhere(flying, path) as moved,
            pytest.raises(GraphInputError, match=rf"captured with rounds\..*{re.escape(moved)}"),
        ):
            guard.check()
        guard.check()
    with elsewhere(flying, "state.lens"), pytest.raises(GraphInputError):
        tokens(llm, [GREEDY])


@ON_CPU
def test_nothing_is_said_where_none_moved(
    name: str, folder: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of the host between those that fly leave what is theirs elsewhere each time."""
    llm = make(folder, spec_of(name, drafters), device="cpu")
    flying = let_fly(llm, monkeypatch, overlaps=False)
    engine, can_fly, asked = llm.engine, llm.engine._can_fly, 0

    def now_and_then(*given: Any) -> bool:
        nonlocal asked
        asked += 1
        return asked % 3 > 0 and can_fly(*given)

    monkeypatch.setattr(engine, "_can_fly", now_and_then)
    for params in BATCHES:
        plain = plain_says(folder, PROMPTS[: len(params)], params)
        assert tokens(llm, params) == [one.token_ids for one in plain]
    assert flying.counters["replays"] > 20
    assert asked > flying.counters["replays"] + 10


@ON_CPU
def test_off_it_costs_nothing(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(target, None, device="cpu")
    flying = let_any_fly(llm, monkeypatch)
    tokens(llm, [GREEDY])
    assert flying.counters["replays"] > 5
    assert flying.guard is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnTheGpu:
    def test_every_kind_of_round_is_watched(
        self, name: str, folder: Path, drafters: dict[str, str]
    ) -> None:
        """Graphs are captured between rounds, too: what comes late is no input that moved."""
        flags: dict[str, Any] = {"debug_cuda_graph": True, "cuda_graph_bs": (1, 2, 4)}
        llm = make(folder, spec_of(name, drafters), **flags)
        for params in BATCHES:
            prompts = PROMPTS[: len(params)]
            plain = plain_says(folder, prompts, params, disable_cuda_graph=True)
            assert tokens(llm, params) == [one.token_ids for one in plain]
        flying = llm.engine.graph_round
        assert flying is not None
        assert flying.guard is not None
        assert flying.counters["replays"] > 20
        for path in [*OF_ALL, *OF_DRAFTERS[name]]:
            with elsewhere(flying, path) as moved, pytest.raises(GraphInputError) as error:
                flying.guard.check()
            assert moved in str(error.value)
            flying.guard.check()
        with elsewhere(flying, "state.lens"), pytest.raises(GraphInputError):
            tokens(llm, [GREEDY])
