"""Models that draft beside suffix matches: what tests of their rounds share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.engine.launched import RoundResult
from specengine.engine.llm import Generation
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.hybrid import HybridDraft
from specengine.engine.round.key import InFlightRound, RoundKey
from tests.support.device_rounds import run_on_device

NAMES = ["EAGLE", "EAGLE3", "STANDALONE", "MTP", "MTP layers"]
STEPS = 3  # of the models
NODES = 12  # of the largest tree, root included; a model's of three levels of two has eleven
PASSAGE = "to be or not to be, that is the question: "
PROMPTS = [PASSAGE * 3, "The quick brown fox", "0123456789" * 4 + "x", "x"]
LONG = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)

# Which drafter proposes trees: the other proposes chains.
TREES: dict[str, dict[str, Any]] = {
    "model": {"eagle_topk": 2},
    "text": {"suffix_branches": 2, "suffix_factor": 6.0},
    "both": {"eagle_topk": 2, "suffix_branches": 2, "suffix_factor": 6.0},
}
TREE_CASES = [
    *((name, kind) for name in ("EAGLE3", "STANDALONE") for kind in TREES),
    ("EAGLE", "both"),
    ("MTP", "model"),
    ("MTP layers", "text"),
]
Folders = dict[str, tuple[Path, SpecConfig]]
Prompts = dict[Path, list[list[int]]]  # by target


def hybrid(spec: SpecConfig, most_nodes: int = 8, **options: Any) -> SpecConfig:
    """The spec's drafter beside suffixes. most_nodes: of their drafts, root included."""
    given = {"adaptive": False, "hybrid_suffix": True, "hybrid_suffix_min_match": 3}
    return replace(spec, **given | {"num_draft_tokens": most_nodes} | options)


def trees(spec: SpecConfig, kind: str, most_nodes: int = NODES, **options: Any) -> SpecConfig:
    """kind: of TREES."""
    return hybrid(spec, most_nodes, **TREES[kind] | options)


def make(folder: Path, spec: SpecConfig | None, **flags: Any) -> LLM:
    given = {"dtype": "float32", "max_total_tokens": 2048, "disable_cuda_graph": True}
    return LLM(str(folder), spec, **given | flags)


def source_of(rounds: RoundExecutor) -> HybridDraft:
    assert isinstance(rounds.source, HybridDraft)
    return rounds.source


def kind_of(key: RoundKey) -> str:
    """Where the drafts of such rounds come from."""
    if key.model_steps == 0:
        return "text"
    return "model" if key.model_steps is None and key.num_steps <= STEPS else "both"


@dataclass
class Sources:
    """Rounds on the device that were collected, by the source of their drafts."""

    keys: Counter[RoundKey] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)  # drafts

    def watch(self, rounds: RoundExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        collect = rounds.collect

        def watched(in_flight: InFlightRound) -> VerifyResult:
            from_lookup = in_flight.plan.from_lookup or [False] * len(in_flight.reqs)
            result, kind = collect(in_flight), kind_of(in_flight.key)
            assert any(from_lookup) <= (kind != "model")
            self.keys[in_flight.key] += 1
            self.rounds[kind] += 1
            for is_text, count in zip(from_lookup, result.num_accepted, strict=True):
                self.accepted["text" if is_text else "model"] += count
            return result

        monkeypatch.setattr(rounds, "collect", watched)


def watched_rounds(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, overlaps: bool = True
) -> tuple[RoundExecutor, Sources]:
    """From now on on the device. Before any request."""
    rounds, sources = run_on_device(llm, overlaps), Sources()
    assert source_of(rounds)
    sources.watch(rounds, monkeypatch)
    return rounds, sources


@dataclass
class Drafted:
    """Drafts of each request, round by round, and how many were accepted."""

    counts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

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
            self.counts.setdefault(rid, []).append((counts[0], counts[1]))

    def watch(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rounds on the device, and those on the host between them."""
        assert llm.engine.pipeline is not None
        collect, run = llm.engine.pipeline.collect, llm.engine.host_round.run

        def watched() -> RoundResult:
            done = collect()
            self.add([req.rid for req in done.reqs], done.result)
            return done

        def run_watched(batch: ScheduleBatch, *given: Any) -> VerifyResult:
            result = run(batch, *given)
            self.add([req.rid for req in batch.reqs], result)
            return result

        monkeypatch.setattr(llm.engine.pipeline, "collect", watched)
        monkeypatch.setattr(llm.engine.host_round, "run", run_watched)

    def rids(self) -> list[str]:
        """In the order in which they were asked, as results are: prompts of one forward may end in
        another."""
        return sorted(self.counts, key=lambda rid: int(rid.partition("#")[0].rpartition("-")[2]))

    def until(self, rid: str, num_tokens: int) -> list[tuple[int, int]]:
        """Counts of rounds that began before so many tokens were emitted; the prefill emits the
        first."""
        emitted, found = 1, []
        for one in self.counts[rid]:
            if emitted >= num_tokens:
                break
            found.append(one)
            emitted += one[1] + 1
        return found


def compare_drafted(mine: Drafted, its: Drafted, results: Sequence[Generation]) -> int:
    """Compare all rounds but the last ones, where the host drafts smaller trees. Returns how many
    were compared."""
    count = 0
    pairs = zip(mine.rids(), its.rids(), strict=True)
    for (rid, other), one in zip(pairs, results, strict=True):
        most = len(one.token_ids) - NODES
        assert mine.until(rid, most) == its.until(other, most)
        count += len(its.until(other, most))
    return count
