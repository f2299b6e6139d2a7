"""A trace, and a file of costs: rank 0 alone has them, and ranks run alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.core.parallel import Link
from specengine.core.parallel_config import ParallelConfig
from specengine.draft.trace.reader import Trace
from specengine.engine.build import build_engine
from specengine.engine.llm import Generation
from tests.support.ranks import Group, told

PROMPTS = [[5, 9, 7, 33, 2], [8, 8, 4, 8, 8]]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
EAGLE3 = SpecConfig(algorithm="EAGLE3", num_steps=4)


@pytest.fixture(scope="module")
def two(link: Link) -> Group:
    return Group("tiny", 2, link)


def test_trace_of_two_ranks_is_that_of_one(two: Group, tmp_path: Path) -> None:
    """Sampled as well, so that both sorts of weights are in it."""
    params = [GREEDY, replace(GREEDY, temperature=0.8, seed=3)]
    traces = []
    for size, loaded in ((1, two.one), (2, two.ranks)):
        path = tmp_path / str(size)
        config = config_from_flags({**two.flags, "trace": str(path)}, EAGLE3)
        llm = LLM.of(build_engine(replace(config, parallel=ParallelConfig(tp_size=size)), loaded))
        llm.generate(PROMPTS, params)
        llm.engine.host_round.recorders[0].close()  # type: ignore[attr-defined]
        traces.append(Trace.read(path))
    one, several = traces
    assert several.requests == one.requests
    assert len(one.rounds.records) > 4
    assert np.array_equal(several.rounds.records, one.rounds.records)
    assert np.array_equal(several.rounds.tokens, one.rounds.tokens)
    for name in one.rounds.nodes.dtype.names:
        found, expected = several.rounds.nodes[name], one.rounds.nodes[name]
        assert np.allclose(found, expected, atol=1e-4, equal_nan=True)


def depths_of(found: Generation) -> set[int]:
    """Of rounds, but the last of a request, which may have room for fewer."""
    return {depth for depth, count in enumerate(found.spec.depth_histogram) if count > 1}


def test_two_ranks_choose_by_a_table_that_rank_0_reads(two: Group, tmp_path: Path) -> None:
    """On the host: by hand, so that another depth is the best one than without it."""
    path, expected = tmp_path / "costs.json", None
    for best in (0, 4):
        costs = {str(k): 1.0 if k == best else 1000.0 for k in range(5)}
        path.write_text(json.dumps({"seconds": {"1": costs, "4": costs}}))
        one, several = two.pair(replace(EAGLE3, cost_table=str(path)))
        assert several.engine.parts.config.spec.cost_table == str(path)
        found = [llm.generate(PROMPTS, GREEDY) for llm in (one, several)]
        tokens = [told(each)[0][0] for each in found]
        assert tokens[0] == tokens[1] == (expected or tokens[0])
        expected = tokens[0]
        assert depths_of(found[1][0]) == {best}


def test_two_ranks_measure_a_table_together_and_rank_0_keeps_it(two: Group, tmp_path: Path) -> None:
    """On the device. Afterwards rank 0 reads it, and no rank measures."""
    path, found = tmp_path / "costs.json", []
    llm = two.pair(replace(EAGLE3, num_steps=1))[1]
    engine: Any = llm.engine
    for _ in range(2):
        engine.call("tests.support.ranks:run_rounds_by_measured_costs", path=str(path))
        tokens = told(llm.generate(PROMPTS, GREEDY))[0][0]
        found.append((path.read_text(), tokens))
    assert found[0] == found[1]
    assert set(json.loads(path.read_text())["seconds"]) == {"1", "2", "4"}
