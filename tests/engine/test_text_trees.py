"""Trees of text fly: the host drafts them, and the device decides what the host's rounds decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from specengine import LLM, GrammarSpec, SamplingParams, SpecConfig, SpecControl
from specengine.core.batch import RowBatch
from specengine.core.spec import DraftProposal, TreeRowDrafter, VerifyResult
from specengine.draft.proposals import Draft, assemble
from specengine.engine.graph_build import _row_drafter
from specengine.engine.graph_round import GraphRound
from specengine.engine.graph_tree import GraphTreeRound
from specengine.engine.host_trees import HostTrees
from specengine.engine.llm import Generation
from specengine.engine.round_form import Flight
from tests.engine.flying_world import let_fly
from tests.engine.test_depth_in_results import Steered
from tests.engine.test_graph_round import EDITED, GREEDY, SAMPLED, TOLD, assert_close

CPU = torch.device("cpu")
ON_CPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="graphs are tested where there is a GPU"
)
TEXT: dict[str, Any] = {"adaptive": False, "num_draft_tokens": 12}
NGRAM: dict[str, Any] = {"algorithm": "NGRAM", "ngram_branches": 2, "ngram_min_match": 1}
SPECS = {
    "NGRAM": SpecConfig(**TEXT, **NGRAM),
    "SUFFIX": SpecConfig(**TEXT | {"num_draft_tokens": 16}, algorithm="SUFFIX", suffix_branches=2),
    "corpus": SpecConfig(**TEXT, **NGRAM, ngram_shared_corpus=True),
}
LONG = replace(GREEDY, max_tokens=48)
# Between two tokens everywhere, so that text goes on now like this and now like that.
TORN = replace(LONG, temperature=9.0, top_k=2, max_tokens=150)
DRAWN = [replace(LONG, temperature=0.3, top_k=2, seed=seed) for seed in range(3)]
Prompt = str | Sequence[int]


@pytest.fixture(scope="module")
def prompts(target: Path) -> list[Prompt]:
    """What the target has said; and one of which nothing is drafted at first."""
    params = [replace(TORN, seed=seed) for seed in (1, 2)]
    return [*(one.token_ids for one in make(target, None).generate(["a", "b"], params)), "x"]


def make(target: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    given = {"dtype": "float32", "max_total_tokens": 2048, "disable_cuda_graph": True}
    return LLM(str(target), spec, **given | flags)


def tokens(results: Sequence[Generation]) -> list[list[int]]:
    return [one.token_ids for one in results]


def counts(results: Sequence[Generation]) -> list[tuple[list[int], int]]:
    return [(one.spec.histogram, one.spec.num_draft_tokens) for one in results]


@dataclass
class Landed:
    """What came of rounds on the device."""

    steps: Counter[int] = field(default_factory=Counter)  # rounds, by the depth of their graph
    moved: int = 0  # paths whose nodes do not lie one behind the other
    idle: int = 0  # requests without a draft, where others had one

    def watch(self, flying: GraphRound, monkeypatch: pytest.MonkeyPatch) -> None:
        land = flying.land

        def watched(flight: Flight) -> VerifyResult:
            result, steps = land(flight), flight.form.num_steps
            self.steps[steps] += 1
            if steps:
                assert flight.drafted_nodes is not None
                assert result.num_drafted == flight.drafted_nodes
                self.idle += flight.drafted_nodes.count(0)
                nodes = flight.outcome[:, steps + 2 :].tolist()
                for path, count in zip(nodes, result.num_accepted, strict=True):
                    assert max(path[:count], default=0) < flying.num_slots
                    self.moved += path[:count] != list(range(1, 1 + count))
                for count, drafted in zip(result.num_accepted, result.num_drafted, strict=True):
                    assert count <= drafted, "what nobody drafted never stands"
            return result

        monkeypatch.setattr(flying, "land", watched)


def fly(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, overlaps: bool = True
) -> tuple[GraphRound, Landed]:
    flying, landed = let_fly(llm, monkeypatch, overlaps), Landed()
    assert isinstance(flying, GraphTreeRound)
    landed.watch(flying, monkeypatch)
    return flying, landed


@ON_CPU
@pytest.mark.parametrize("overlaps", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("params", [[LONG] * 3, DRAWN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SPECS)
def test_tokens_and_rounds_are_those_of_the_host(
    name: str,
    params: list[SamplingParams],
    overlaps: bool,
    target: Path,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = tokens(make(target, None).generate(prompts, params))
    host, llm = make(target, SPECS[name]), make(target, SPECS[name])
    flying, landed = fly(llm, monkeypatch, overlaps)
    for _ in range(2):  # with captures, and with texts of others
        its, mine = host.generate(prompts, params), llm.generate(prompts, params)
        assert tokens(mine) == tokens(its) == expected
        assert counts(mine) == counts(its)
    print(name, landed, flying.counters, llm.engine.scheduler.spec_totals, flying.steps)
    assert flying.counters.keys() == {"captures", "replays"}, "nothing took the host's round"
    totals = llm.engine.scheduler.spec_totals
    assert totals == host.engine.scheduler.spec_totals
    assert totals.num_accepted_tokens > 20
    assert landed.steps.keys() == {*flying.steps}
    assert landed.moved > 2
    assert landed.idle > 2
    llm.engine.scheduler.check_invariant()
