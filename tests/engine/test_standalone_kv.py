"""Trees of a smaller model leave it the KV that a prompt of the same text would, whatever rounds
they were drafted in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specengine import SpecConfig
from specengine.core.request import Req
from specengine.draft.standalone.worker import StandaloneWorker
from specengine.engine.ragged_build import add_draft_loops
from specengine.engine.row_choices import rows_of
from tests.engine.flying_world import let_fly
from tests.engine.test_graph_round import GREEDY, PROMPTS
from tests.engine.test_graph_weighed import ON_CPU
from tests.engine.test_no_graphs import with_graphs
from tests.engine.test_standalone_trees import pair_of, specs_of
from tests.support.cpu_graphs import use_functions

Folders = dict[str, tuple[Path, SpecConfig]]


@pytest.fixture(scope="module")
def specs(folders: Folders, target: Path) -> dict[str, SpecConfig]:
    """Of what drafts "for itself" all that it drafts stands."""
    found = specs_of(folders)
    itself = replace(found["2"], draft_model_path=str(target), static_tree=True)
    return found | {"for itself": itself}


def kv_of(drafter: StandaloneWorker, reqs: list[Req], size: int) -> Iterator[Tensor]:
    """The draft's, of the first tokens of each."""
    pools = drafter.runner.pools
    kv = pools.token_to_kv_pool
    for row in rows_of(reqs):
        slots = pools.req_to_token_pool.req_to_token[row, :size].long()
        for layer in range(2):
            yield from (one[slots] for one in kv.get_kv_buffer(layer))


# rounds in four that fly, and whether a loop drafts for the others
MIXES = [({0, 1, 2, 3}, False), ({1, 2}, False), ({3}, False), ({1, 2}, True), (set(), True)]


@ON_CPU
@pytest.mark.parametrize(("flown", "loops"), MIXES)
@pytest.mark.parametrize("name", ["2", "3", "one level", "for itself"])
def test_whatever_rounds_were_all_before_the_last_two_have_their_kv(
    name: str,
    flown: set[int],
    loops: bool,
    target: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, llm = pair_of(target, specs[name], context_length=160)
    drafters = [cast(StandaloneWorker, one.engine.drafter) for one in (llm, host)]
    flying = let_fly(llm, monkeypatch, overlaps=False)
    counters = Counter[str]()
    if loops:
        use_functions(monkeypatch)
        counters = add_draft_loops(with_graphs(llm), llm.engine.drafter)["draft loop"]
    can_fly, asked = llm.engine._can_fly, 0

    def by_turns(*given: Any) -> bool:
        nonlocal asked
        asked += 1
        return asked % 4 in flown and can_fly(*given)

    monkeypatch.setattr(llm.engine, "_can_fly", by_turns)
    for n, prompt in enumerate(PROMPTS):
        params = replace(GREEDY, max_tokens=80)
        llm.engine.add_request(str(n), llm.tokenizer.encode(prompt), params)
    reqs = [*llm.engine.choices]
    for _ in range(12):
        llm.engine.step()
        texts = [req.token_ids for req in reqs]
        for n, (req, text) in enumerate(zip(reqs, texts, strict=True)):
            assert req.kv_len == len(text) - 1
            host.engine.add_request(f"{len(text)} {n}", text, replace(GREEDY, max_tokens=9))
        host.engine.step()
        read = [*host.engine.choices]
        for req, other in zip(reqs, read, strict=True):
            size = req.kv_len - 1
            theirs = zip(drafters, (req, other), strict=True)
            columns = (kv_of(drafter, [whose], size) for drafter, whose in theirs)
            for one, its in zip(*columns, strict=True):
                torch.testing.assert_close(one, its, rtol=1e-3, atol=1e-4)
        for other in read:
            host.engine.abort(other.rid.split("#")[0])
        host.engine.step()
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 5
    assert (flying.counters["replays"] > 1) == bool(flown)
    assert (counters["replays"] > 1) == loops
