"""The engine's accepted length, which /metrics shows, is that of its requests taken together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.spec_stats import SpecStats
from specengine.engine.outputs import add_stats

PROMPTS = ["abcabcabc", "The quick brown fox", "x", "0123456789" * 4]


@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_the_engine_counts_the_rounds_of_its_requests(
    algorithm: str | None, small_models: dict[str, Path]
) -> None:
    """Rounds without a draft and rounds beside a prefill too."""
    spec = SpecConfig() if algorithm is None else SpecConfig(algorithm=algorithm, ngram_min_match=1)
    spec = replace(spec, adaptive=False)
    flags = {"chunked_prefill_size": 8, "enable_mixed_chunk": True, "max_total_tokens": 2048}
    llm = LLM(str(small_models["llama"]), spec, dtype="float32", **flags)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    requests = SpecStats()
    for one in llm.generate(PROMPTS, params, progress=False):
        add_stats(requests, one.spec)
    totals = llm.engine.stats().spec
    assert totals.num_rounds == requests.num_rounds
    assert totals.mean_acceptance_length == requests.mean_acceptance_length
    assert totals.num_drafts < totals.num_rounds
    assert (totals.num_accepted_tokens > 0) == (algorithm is not None)
