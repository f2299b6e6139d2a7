"""Trees of a smaller model leave it the KV that a prompt of the same text would, whatever rounds
they were drafted in."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from specengine import SpecConfig
from specengine.draft.standalone.worker import StandaloneWorker
from specengine.engine.forward_graphs_build import add_draft_loops
from tests.halves import each_value
from tests.support.cpu_graphs import use_functions
from tests.support.device_rounds import run_on_device
from tests.support.draft_kv import assert_same_kv
from tests.support.rounds import GREEDY, ON_CPU, PROMPTS, make, with_graphs
from tests.support.standalone_trees import specs_of

Folders = dict[str, tuple[Path, SpecConfig]]


@pytest.fixture(scope="module")
def specs(folders: Folders, target: Path) -> dict[str, SpecConfig]:
    """In "for itself" the drafter is the target, so that all drafts are accepted."""
    found = specs_of(folders)
    itself = replace(found["2"], draft_model_path=str(target), static_tree=True)
    return found | {"for itself": itself}


# rounds in four that run on the device, and whether a loop drafts for the others
MIXES = [({0, 1, 2, 3}, False), ({1, 2}, False), ({3}, False), ({1, 2}, True), (set(), True)]


@ON_CPU
@pytest.mark.parametrize(
    ("name", "on_device", "loops"), each_value(2, ["2", "3", "one level", "for itself"], MIXES)
)
def test_smaller_model_has_kv_of_all_but_two_tokens_after_any_rounds(
    name: str,
    on_device: set[int],
    loops: bool,
    target: Path,
    specs: dict[str, SpecConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags: dict[str, Any] = {"disable_cuda_graph": True, "context_length": 160}
    host, llm = (make(target, specs[name], **flags) for _ in range(2))
    drafter = cast(StandaloneWorker, llm.engine.drafter)
    rounds = run_on_device(llm, overlaps=False)
    counters = Counter[str]()
    if loops:
        use_functions(monkeypatch)
        counters = add_draft_loops(with_graphs(llm), drafter)["draft loop"]
    runs_on_device, asked = llm.engine._runs_on_device, 0

    def by_turns(*given: Any) -> bool:
        nonlocal asked
        asked += 1
        return asked % 4 in on_device and runs_on_device(*given)

    monkeypatch.setattr(llm.engine, "_runs_on_device", by_turns)
    for n, prompt in enumerate(PROMPTS):
        params = replace(GREEDY, max_tokens=80)
        llm.engine.add_request(str(n), llm.tokenizer.encode(prompt), params)
    reqs = [*llm.engine.choices]
    for _ in range(12):
        llm.engine.step()
        assert_same_kv(drafter, reqs, host)
    assert llm.engine.scheduler.spec_totals.num_accepted_tokens > 5
    assert (rounds.counters["replays"] > 1) == bool(on_device)
    assert (counters["replays"] > 1) == loops
