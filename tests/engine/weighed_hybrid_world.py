"""Models that draft beside suffix matches under verifiers that weigh drafts, or relax them: what
tests of their rounds share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig, SpecControl
from specengine.engine.graph_weighed import WeighingRound
from specengine.kernels.accept_sampled import Accepted, Draws, SampledRound
from tests.engine import test_weighed_wishes
from tests.engine.hybrid_world import LONG, Sources, fly, make
from tests.engine.test_graph_relaxed import RULE
from tests.engine.test_graph_round import SAMPLED

Folders = dict[str, tuple[Path, SpecConfig]]
Prompts = dict[Path, list[list[int]]]  # by target

# Whether the model's drafts are sampled, and how they are verified.
RULES: dict[str, dict[str, Any]] = {
    "rejection": {"verify": "rejection", "draft_sampling": True},
    "block": {"verify": "block", "draft_sampling": True},
    "sibling": {"verify": "sibling", "draft_sampling": True},
    "target_only": {"verify": "target_only", "draft_sampling": True},
    "of the best": {"verify": "target_only"},
    "relaxed": RULE | {"draft_sampling": True},
    "relaxed best": RULE,
}
CONTEXT = 190
FLAGS: dict[str, Any] = {
    "context_length": CONTEXT,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "disable_radix_cache": True,
}
# Between two tokens everywhere: what text says next, and what a model does, stands now and then.
TORN = replace(LONG, temperature=3.0, top_k=2)
ALONE = replace(TORN, temperature=9.0, seed=41, max_tokens=70)  # where it has text, all have
WISHES = {
    "ends": [  # by max_tokens and by context, limits, and greedy ones among those that sample
        replace(TORN, seed=31, max_tokens=40),
        replace(LONG, max_tokens=41),
        replace(TORN, seed=32, max_tokens=None),
        replace(TORN, seed=33, max_tokens=30, speculative=SpecControl(num_steps=1)),
        replace(SAMPLED[4], max_tokens=30, speculative=SpecControl(num_steps=5)),
        replace(TORN, seed=35, max_tokens=20, speculative=SpecControl(enabled=False)),
    ],
    **test_weighed_wishes.WISHES,
}


def prompts_of(torn: Prompts, folder: Path, count: int = 6) -> list[Any]:
    """Ends of what the target has said, twice, so that text drafts; and others."""
    every = [*torn[folder], [40, 41] * 20, [50]]
    return [one[-55:] * 2 for one in every[:count]]


def shorter(params: list[SamplingParams], most: int = 30) -> list[SamplingParams]:
    """So that nobody comes near the context's end, and no greedy request is left alone: rounds of
    these are matched, and count a model's tree near an output's end as the device has it."""
    limits = [10 if one.is_greedy else most for one in params]
    pairs = zip(params, limits, strict=True)
    return [replace(one, max_tokens=min(one.max_tokens or most, limit)) for one, limit in pairs]


def pair_of(folder: Path, spec: SpecConfig, **more: Any) -> tuple[LLM, LLM]:
    """The host's rounds, and those that are to fly."""
    host, llm = (make(folder, spec, **FLAGS | more) for _ in range(2))
    return host, llm


def pair_on_the_gpu(folder: Path, spec: SpecConfig, overlap: bool) -> tuple[LLM, LLM]:
    """Without graphs, and with them."""
    graphs = {"disable_cuda_graph": False, "cuda_graph_bs": (1, 2, 4, 8)}
    graphs |= {"disable_overlap_schedule": not overlap}
    return make(folder, spec, **FLAGS), make(folder, spec, **FLAGS | graphs)


def flying_of(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, overlaps: bool = True
) -> tuple[WeighingRound, Sources]:
    flying, sources = fly(llm, monkeypatch, overlaps, most=8)
    assert isinstance(flying, WeighingRound)
    return flying, sources


def seen_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], Any]:
    """What the rule gets to see of each sampling request's drafts, by seed and position: tokens,
    parents and depths; and what they were drawn from, a row each, scaled to 1."""
    verifier: Any = llm.engine.parts.verifier
    found = dict[tuple[int, int], Any]()

    def judge(
        drafts: SampledRound, draws: Draws, *, backend: Any, kernel: Any = verifier.kernel
    ) -> Accepted:
        columns = drafts.tokens_BN, drafts.parents_BN, drafts.depths_BN
        for b, exists_N in enumerate(drafts.exists_BN):
            if drafts.greedy_B[b] or not int(draws.seeds_B[b]):
                continue
            key = int(draws.seeds_B[b]), int(draws.positions_B[b])
            rows_NV: Tensor | None = None
            if drafts.draft_BNV is not None:
                rows_NV = drafts.draft_BNV[b][exists_N][1:].double()
                rows_NV = rows_NV / rows_NV.sum(-1, keepdim=True)
            found[key] = [x[b][exists_N].tolist() for x in columns], rows_NV
        accepted: Accepted = kernel(drafts, draws, backend=backend)
        return accepted

    monkeypatch.setattr(verifier, "kernel", judge)
    return found
