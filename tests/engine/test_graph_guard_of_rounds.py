"""Under --debug-cuda-graph an input of a round that moved is reported, and nothing else is."""

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
from specengine.engine.round.executor import RoundExecutor
from tests.draft.mtp_reading import add_mtp
from tests.halves import slow_but
from tests.support.device_rounds import run_on_device
from tests.support.mtp_targets import predictable
from tests.support.plain import plain_says
from tests.support.rounds import (
    EDITED,
    GREEDY,
    ON_CPU,
    PROMPTS,
    SAMPLED,
    WHERE,
    WITH_LOGPROBS,
    make,
)

WITH_GRAMMAR = [
    replace(SAMPLED[0], grammar=GrammarSpec.regex("[a-z]{40}")),
    GREEDY,
    WITH_LOGPROBS[0],
]
BATCHES = [[GREEDY] * 3, SAMPLED[:3], EDITED, WITH_LOGPROBS, WITH_GRAMMAR]
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
# A model's drafts and lookup; the others in `make test-all`.
WATCHED = ["a tree of a model", "a tree of text"]
# By their paths from the round; of the last attribute, what the error says.
OF_ALL = [
    "rows",
    "state.lens",
    "state.roots",
    "state.outcomes",
    "sampling.table.words",
    "sampling.edits._tables.bias",
    "sampling.edits._tables.slots",
    "round.logprobs._table",
    "round.masks._words",
    "round.masks._slots",
    "runner.pools.req_to_token_pool.req_to_token",
    "runner.pools.token_to_kv_pool._k.1",
    "runner.attn_backend.counters",
    "runner.model.head._meeting.keys",
    "runner._row_batches._even.first",
]
OF_EAGLE = [
    "source.drafter.states",
    "source.drafter.first_keys",
    "source.drafter.tree_rows.counters",
]
OF_DRAFTERS = {
    "plain": [],
    "NGRAM": ["source.buffer"],
    "EAGLE": OF_EAGLE,
    "EAGLE3": [*OF_EAGLE, "source.drafter.runner.pools.token_to_kv_pool._v.0"],
    "STANDALONE": ["source.drafter.previous", "source.drafter.runner.model.model.norm.weight"],
    "MTP": [
        "source.drafter.layer_states",
        "source.drafter.runners.2.model.final_norm.weight",
        "source.drafter.runners.1.pools.token_to_kv_pool._k.1",
        "source.drafter.runners.2._row_batches._even.first",
    ],
    "a tree": OF_EAGLE,
    "a static tree": [*OF_EAGLE, "source.drafter.tree_rows.rank_scores"],
    "a tree of a model": ["source.drafter.previous", "source.drafter.tree_rows.counters"],
    "a tree of text": ["source.buffer"],
}
# Those with an input that no other has; the others in `make test-all`.
OF_THEIR_OWN = ["NGRAM", "EAGLE3", "STANDALONE", "MTP", "a static tree"]


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


@pytest.fixture
def folder(name: str, target: Path, with_mtp: Path) -> Path:
    return with_mtp if name == "MTP" else target


def guarded(
    where: str, folder: Path, spec: SpecConfig | None, overlaps: bool = True
) -> tuple[LLM, RoundExecutor]:
    """On a GPU graphs are captured between rounds, too: what comes late is no input that moved."""
    if where == "gpu":
        llm = make(folder, spec, debug_cuda_graph=True, cuda_graph_bs=(1, 2, 4))
        assert llm.engine.device_rounds is not None
        return llm, llm.engine.device_rounds
    llm = make(folder, spec)
    llm.engine.parts.worker.runner.guards_graphs = True
    return llm, run_on_device(llm, overlaps)


def check_tokens(llm: LLM, folder: Path, most: int) -> None:
    """most: of each request."""
    for batch in BATCHES:
        params = [
            replace(one, max_tokens=most, min_tokens=min(one.min_tokens, most)) for one in batch
        ]
        plain = plain_says(folder, PROMPTS[: len(params)], params, disable_cuda_graph=True)
        assert tokens(llm, params) == [one.token_ids for one in plain]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", slow_but(OF_THEIR_OWN, SHAPES))
def test_input_that_moved_is_reported(
    name: str, folder: Path, where: str, drafters: dict[str, str]
) -> None:
    llm, rounds = guarded(where, folder, spec_of(name, drafters))
    check_tokens(llm, folder, 7)
    guard = rounds.guard
    assert guard is not None
    assert rounds.counters["replays"] > 20
    for path in [*OF_ALL, *OF_DRAFTERS[name]]:
        with (
            elsewhere(rounds, path) as moved,
            pytest.raises(GraphInputError, match=rf"captured with rounds\..*{re.escape(moved)}"),
        ):
            guard.check()
        guard.check()
    if (name, where) == ("EAGLE3", "cpu"):
        drafter: Any = llm.engine.parts.drafter
        fc = drafter.runner.model.fc
        fc.bias = torch.nn.Parameter(torch.zeros(64), requires_grad=False)
        with pytest.raises(GraphInputError, match=r"model\.fc\.bias at None"):
            guard.check()
        fc.bias = None
    with elsewhere(rounds, "state.lens"), pytest.raises(GraphInputError):
        tokens(llm, [GREEDY])


@ON_CPU
@pytest.mark.parametrize("name", slow_but(WATCHED, SHAPES))
def test_nothing_is_reported_where_no_input_moved(
    name: str, folder: Path, drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of the host in between allocate their tensors anew each time."""
    llm, rounds = guarded("cpu", folder, spec_of(name, drafters), overlaps=False)
    runs_on_device, count = llm.engine._runs_on_device, 0

    def two_of_three(*given: Any) -> bool:
        nonlocal count
        count += 1
        return count % 3 > 0 and runs_on_device(*given)

    monkeypatch.setattr(llm.engine, "_runs_on_device", two_of_three)
    check_tokens(llm, folder, 10)
    assert rounds.counters["replays"] > 20
    assert count > rounds.counters["replays"] + 10


@ON_CPU
def test_guard_is_off_by_default(target: Path) -> None:
    llm = make(target, None)
    rounds = run_on_device(llm)
    tokens(llm, [GREEDY])
    assert rounds.counters["replays"] > 5
    assert rounds.guard is None
