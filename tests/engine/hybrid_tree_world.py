"""Trees of models beside those of text: what tests of their rounds share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig, SpecControl
from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.engine.flights import Landing
from specengine.engine.graph_hybrid import GraphHybridTreeRound
from specengine.engine.llm import Generation
from tests.engine.hybrid_world import LONG, Sources, fly, hybrid, make
from tests.support.plain import plain_says
from tests.engine.test_graph_round import SAMPLED

NODES = 12  # of the largest tree, root included; a model's of three levels of two has eleven
TORN = SamplingParams(temperature=9.0, top_k=2, max_tokens=260, ignore_eos=True)
# Who drafts trees: the others draft chains.
KINDS: dict[str, dict[str, Any]] = {
    "model": {"eagle_topk": 2},
    "text": {"suffix_branches": 2, "suffix_factor": 6.0},
    "both": {"eagle_topk": 2, "suffix_branches": 2, "suffix_factor": 6.0},
}
CASES = [
    *((name, kind) for name in ("EAGLE3", "STANDALONE") for kind in KINDS),
    ("EAGLE", "both"),
    ("MTP", "model"),
    ("MTP layers", "text"),
]
Prompt = list[int]
Folders = dict[str, tuple[Path, SpecConfig]]
Prompts = dict[Path, list[Prompt]]  # by target

SURE = replace(LONG, temperature=3.0, top_k=2, seed=21)
PARAMS = {
    "greedy": [LONG] * 4,
    "mixed": [
        replace(LONG, speculative=SpecControl(num_steps=1)),
        replace(SURE, max_tokens=45),
        replace(SAMPLED[0], max_tokens=50, speculative=SpecControl(num_steps=5)),
        replace(LONG, speculative=SpecControl(enabled=False)),
    ],
}


def trees(spec: SpecConfig, kind: str, most_nodes: int = NODES, **options: Any) -> SpecConfig:
    return hybrid(spec, most_nodes, **KINDS[kind] | options)


def flying_of(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, overlaps: bool = True
) -> tuple[GraphHybridTreeRound, Sources]:
    flying, sources = fly(llm, monkeypatch, overlaps)
    assert isinstance(flying, GraphHybridTreeRound)
    return flying, sources


def check(llm: LLM, folder: Path, prompts: list[Prompt], params: list[SamplingParams]) -> None:
    """That it says what plain decoding says."""
    found = llm.generate(prompts, params)
    expected = plain_says(folder, prompts, params, disable_cuda_graph=True)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    llm.engine.scheduler.check_invariant()


def torn_prompts(folder: Path) -> list[Prompt]:
    """What the target has said, between two tokens everywhere, so that text goes on now like this
    and now like that; and some of which nothing is drafted at first."""
    llm, params = make(folder, None), [replace(TORN, seed=seed) for seed in (1, 2)]
    said = [one.token_ids for one in llm.generate(["a", "b"], params)]
    fresh = [llm.tokenizer.encode(text) for text in ("x", "The quick brown fox")]
    return [said[0], fresh[0], said[1], fresh[1]]


@dataclass
class Rounds:
    """Of each request, in the order in which it landed: drafts, and those that stood."""

    of: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None:
        """As a RoundRecorder."""
        self.add([req.rid for req in batch.reqs], result)

    def add(self, rids: Sequence[str], result: VerifyResult) -> None:
        for rid, *counts in zip(rids, result.num_drafted, result.num_accepted, strict=True):
            self.of.setdefault(rid, []).append((counts[0], counts[1]))

    def watch(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rounds on the device, and those beside them."""
        assert llm.engine.flights is not None
        land, run = llm.engine.flights.land, llm.engine.round.run

        def watched() -> Landing:
            landing = land()
            self.add([req.rid for req in landing.reqs], landing.result)
            return landing

        def run_watched(batch: ScheduleBatch, *given: Any) -> VerifyResult:
            result = run(batch, *given)
            self.add([req.rid for req in batch.reqs], result)
            return result

        monkeypatch.setattr(llm.engine.flights, "land", watched)
        monkeypatch.setattr(llm.engine.round, "run", run_watched)

    def until(self, rid: str, num_tokens: int) -> list[tuple[int, int]]:
        """Those that began before so many were said; the first was the prefill's."""
        said, found = 1, []
        for one in self.of[rid]:
            if said >= num_tokens:
                break
            found.append(one)
            said += one[1] + 1
        return found


def same_rounds(mine: Rounds, its: Rounds, results: Sequence[Generation]) -> int:
    """Whose output nears its end has a smaller tree on the host -> rounds that were compared."""
    count = 0
    for (rid, other), one in zip(zip(mine.of, its.of, strict=True), results, strict=True):
        most = len(one.token_ids) - NODES
        assert mine.until(rid, most) == its.until(other, most)
        count += len(its.until(other, most))
    return count
