"""Two engines of two ranks each: attention over two ranks, experts over four."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specengine import SpecConfig
from specengine.core.parallel import communicator
from specengine.engine.build import build_engine, load_sharing
from specengine.engine.phases import Phases
from specengine.engine.sharing import Meeting
from specengine.layers.sparse_mlp import SparseMLP
from tests.support.pretended_ranks import on_threads
from tests.support.shared_experts import NGRAM, SPECS, Plan, alone, config_of, run_plan

# Of each engine, in turn: one is idle until late, or always.
PLANS: list[list[Plan]] = [[[(0, 0), (1, 3), (2, 3)], [(3, 9), (4, 9)]], [[(1, 0)], []]]
FLAGS: dict[str, Any] = {
    "dp_size": 2,
    "tp_size": 2,
    "enable_dp_attention": True,
    "enable_sleep_mode": True,
    "load_format": "dummy",
}


PIECES: dict[str, Any] = {
    "cuda_graph_mode": "piecewise",
    "piecewise_cuda_graph_tokens": (4, 12, 16),
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread_a_rank")
@pytest.mark.parametrize("more", [{}, PIECES], ids=["whole", "in pieces"])
def test_engines_of_two_ranks_share_experts(
    more: dict[str, Any], small_models: dict[str, Path], tmp_path: Path
) -> None:
    """Each says what it says alone, whichever other idles, and after all have slept. In
    `make test-all`: four ranks take long to start. In `make test` engines of two ranks that share
    experts are served and sleep (tests/e2e/test_several_engines.py), drafters idle beside others in
    rounds on the device (test_shared_experts.py), and two ranks draft as one (test_ranks_agree.py).
    """
    folder, meeting = small_models["qwen3moe"], tmp_path / "meeting"
    meeting.mkdir()
    cases: list[tuple[SpecConfig | None, str]] = [
        (replace(NGRAM, num_draft_tokens=3), "host"),
        (SPECS["mtp"], "device"),
    ]
    expected = [alone(folder, spec, load_format="dummy") for spec, _ in cases]

    def run() -> None:
        number = communicator().rank
        config = config_of(folder, None, **FLAGS)
        loaded = load_sharing(config, Phases(), Meeting(str(meeting), number, 2))
        for (spec, where), says in zip(cases, expected, strict=True):
            given = FLAGS | more if where == "host" else FLAGS
            engine: Any = build_engine(config_of(folder, spec, **given), loaded)
            sharers = engine.parts.sharers
            model: Any = loaded.model
            parts = [one.experts.part for one in model.modules() if isinstance(one, SparseMLP)]
            assert {4 * one.size == one.whole for one in parts} == {True}
            if where == "device":
                engine.call("tests.support.shared_experts:run_on_device")
            for plans in PLANS:
                said = run_plan(engine, plans[number])
                assert said == {one: says[one] for one, _ in plans[number]}
            assert sharers.num_idle > 0
            if more and where == "host":
                assert engine.stats().graphs["piecewise"].replays > 5
            if spec is not None and spec.algorithm == "NGRAM":  # the first on these weights
                assert engine.sleep(1) > 0
                engine.wake()
                assert run_plan(engine, [(number, 0)]) == {number: says[number]}
        loaded.link.watch.end()

    on_threads(2, run)
