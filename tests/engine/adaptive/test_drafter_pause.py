"""A drafter of hidden states pauses while plain decoding stands, in a whole engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.draft.eagle.worker import EagleWorker
from specengine.engine.adaptive.choose import DrafterPause
from specengine.engine.adaptive.costs import StepCosts
from specengine.engine.adaptive.state import DepthChooser
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.key import InFlightRound, RoundKey, RoundPlan
from specengine.engine.round.sampling import rows_of
from tests.draft.eagle_checkpoints import eagle3
from tests.support.device_rounds import run_on_device

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Watched:
    """The rows that a drafter missed, beside the first keys that it keeps."""

    def __init__(
        self, llm: LLM, rounds: RoundExecutor, mixed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """mixed: rounds also run beside prompts."""
        drafter = llm.engine.drafter
        assert isinstance(drafter, EagleWorker)
        self.drafter = drafter
        self.missed: set[int] = set()
        self.first_keys = drafter.first_keys.tolist()
        self.resumed = self.seeded = 0
        launch, observe, see = rounds._launch, drafter.observe_rows, drafter._see_all

        def watched_launch(reqs: list[Req], plan: RoundPlan, key: RoundKey) -> InFlightRound:
            if key.paused:
                self.missed.update(rows_of(reqs))
            return launch(reqs, plan, key)

        def watched_observe(rows: RowBatch, *given: Any) -> None:
            self.look(rows)
            observe(rows, *given)

        def watched_see(rows: Tensor) -> None:
            see(rows)
            assert not {*rows.tolist()}.intersection(rows_of(llm.engine.scheduler.queues.running))
            for row in rows.tolist():
                self.seeded += row in self.missed
                self.missed.discard(row)
                self.first_keys[row] = 0
            if mixed:
                self.look_at(list(self.missed), rounds.state.lens[list(self.missed)].tolist())

        monkeypatch.setattr(rounds, "_launch", watched_launch)
        monkeypatch.setattr(drafter, "observe_rows", watched_observe)
        monkeypatch.setattr(drafter, "_see_all", watched_see)

    def look(self, rows: RowBatch) -> None:
        self.look_at(rows.rows_B.tolist(), rows.lens_B.tolist())

    def look_at(self, rows: list[int], lens: list[int]) -> None:
        for row, length in zip(rows, lens, strict=True):
            if row in self.missed:
                self.resumed += 1
                self.missed.remove(row)
                self.first_keys[row] = length
            assert row == 0 or int(self.drafter.first_keys[row]) == self.first_keys[row]


@pytest.mark.parametrize("mixed", [False, True], ids=["prompts alone", "mixed"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_paused_drafter_marks_the_missed_positions_and_no_others(
    overlaps: bool,
    mixed: bool,
    small_models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests come and go while it is paused, and reuse each other's rows."""
    asked = {
        str(number): ([7 + number, 9, 30 + number], replace(GREEDY, max_tokens=length))
        for number, length in enumerate([40, 6, 9, 5, 14, 7, 30, 4, 8, 21, 5, 12, 6, 3, 9])
    }
    target = small_models["llama"]
    spec = SpecConfig(algorithm="EAGLE3", draft_model_path=str(eagle3(tmp_path / "d", target)))
    flags: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048, "device": "cpu"}
    flags |= {"disable_radix_cache": True, "max_running_requests": 4, "enable_mixed_chunk": mixed}
    plain = LLM(str(target), **flags)
    llm = LLM(str(target), replace(spec, num_steps=2), **flags)
    rounds = run_on_device(llm, overlaps)
    rounds.may_pause, rounds.steps = True, [0, 1, 2]
    pipeline = llm.engine.pipeline
    assert pipeline is not None
    pipeline.depths.chooser = DepthChooser(rounds.steps, StepCosts({4: {0: 1.0, 1: 9.0, 2: 18.0}}))
    pipeline.depths.pause = DrafterPause(paused=9, active=2)
    watched = Watched(llm, rounds, mixed, monkeypatch)
    waiting, found, steps = list(asked), dict[str, list[int]](), 0
    while waiting or llm.engine.has_work:
        if waiting and steps % 4 == 0:
            llm.engine.add_request(waiting[0], *asked[waiting.pop(0)])
        found |= {one.rid: one.token_ids for one in llm.engine.step()}
        steps += 1
    prompts, params = zip(*asked.values(), strict=True)
    expected = plain.generate(list(prompts), list(params))
    assert [found[rid] for rid in asked] == [one.token_ids for one in expected]
    assert watched.resumed > 5
    assert watched.seeded > 2
