"""What is learned of a model's drafts and of those of text, which take their place now and then."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from specengine.engine.adaptive.acceptance import Acceptance, HybridAcceptance, RoundObservation, make_acceptance
from specengine.engine.adaptive.costs import RunningCosts
from specengine.engine.adaptive.estimate import expected_tokens
from specengine.engine.adaptive.state import AdaptiveSteps

MODEL, DEPTH = 3, 7  # steps
ALL, NONE = [1.0] * DEPTH, [0.0] * DEPTH


def learned(
    rounds: int, drafted: list[int], accepted: list[int], of_text: list[bool] | None
) -> HybridAcceptance:
    acceptance = HybridAcceptance(DEPTH, MODEL)
    for _ in range(rounds):
        acceptance.observe(DEPTH, RoundObservation(drafted, accepted, of_text=of_text))
    return acceptance


def test_text_that_stands_says_nothing_of_the_model() -> None:
    acceptance = learned(400, [7, 3, 3, 3], [7, 0, 0, 0], [True, False, False, False])
    assert acceptance.model.chances() == pytest.approx([0.0] * MODEL, abs=0.02)
    assert acceptance.text.chances() == pytest.approx([1.0] * DEPTH, abs=0.02)
    assert acceptance.text_share == pytest.approx(0.25, abs=0.01)
    assert expected_tokens(acceptance.chances())[DEPTH] == pytest.approx(1 + 7 / 4, abs=0.05)


def test_past_the_model_nothing_stands_but_of_those_who_have_text() -> None:
    """Though all drafts stand that there are."""
    acceptance = learned(400, [7, 3, 3, 3], [7, 3, 3, 3], [True, False, False, False])
    tokens = expected_tokens(acceptance.chances())
    assert tokens[MODEL] == pytest.approx(4.0, abs=0.05)
    assert tokens[DEPTH] == pytest.approx(4.0 + 4 / 4, abs=0.05)
    levels = [acceptance.mean_levels(steps) for steps in (0, 2, 3, 7)]
    assert levels == pytest.approx([0, 2, 3, 4], abs=0.05)


def test_nobody_has_text() -> None:
    acceptance = learned(600, [3, 3], [3, 1], None)
    assert expected_tokens(acceptance.chances())[DEPTH] == pytest.approx(3.0, abs=0.05)
    assert acceptance.mean_levels(DEPTH) == pytest.approx(MODEL, abs=0.05)
    assert acceptance.coverage == pytest.approx(1.0)


def test_who_drafts_nothing_has_no_draft_of_either_kind() -> None:
    """A text's was cut to nothing for one."""
    acceptance = learned(600, [3, 0, 0, 5], [3, 0, 0, 5], [False, False, True, True])
    assert acceptance.coverage == pytest.approx(0.5, abs=0.01)
    assert acceptance.text_share == pytest.approx(0.5, abs=0.01)
    assert expected_tokens(acceptance.chances())[5] == pytest.approx(1 + (3 + 5) / 2, abs=0.1)


def test_in_graphs_all_cost_what_the_deepest_does() -> None:
    """So a few that have text make a round of many deep."""
    steps = AdaptiveSteps([0, MODEL, DEPTH], model_steps=MODEL, pads=True)
    levels, of_text = [MODEL] * 63 + [DEPTH], [False] * 63 + [True]
    for _ in range(200):
        steps.observe(64, DEPTH, levels, levels, 3.0, of_text=of_text)
        steps.observe(64, MODEL, [MODEL] * 64, [MODEL] * 64, 2.0, of_text=of_text)
        steps.observe(64, 0, [0] * 64, [0] * 64, 1.0)
    assert steps.costs.of(64, DEPTH) == 3.0
    assert steps.costs.of(64, MODEL) == 2.0
    acceptance = steps.acceptance
    assert acceptance.mean_levels(DEPTH, 1) == pytest.approx(MODEL + 4 / 64, abs=0.02)
    assert acceptance.mean_levels(DEPTH, 64) == pytest.approx(MODEL + 4 * 0.635, abs=0.1)
    assert acceptance.mean_levels(MODEL, 64) == MODEL


def test_in_graphs_a_short_text_costs_what_the_longest_does() -> None:
    """One graph is deeper than the model."""
    steps = AdaptiveSteps([0, MODEL, DEPTH], model_steps=MODEL, pads=True)
    for longest, seconds in ((MODEL + 1, 4.0), (MODEL - 1, 2.0)):
        told = [longest, 0], [longest, 0], seconds
        for _ in range(20):
            steps.observe(2, DEPTH, *told, of_text=[True, False])
            steps.observe(2, 0, [0, 0], [0, 0], 1.0)
    assert steps.costs.of(2, DEPTH) == 4.0
    assert steps.costs.of(2, MODEL - 1) == 2.0


def test_padding_that_stood_was_no_draft() -> None:
    acceptance = HybridAcceptance(DEPTH, MODEL)
    for _ in range(400):
        told = RoundObservation([1, 3, 3], [1, 3, 0], limits=[1, 1, 1], of_text=[True, False, False])
        acceptance.observe(DEPTH, told)
    assert acceptance.model.chances() == pytest.approx([0.5] * MODEL, abs=0.02)


def test_nodes_of_a_models_tree_do_not_tell_how_deep_it_is() -> None:
    """What a round costs is known by its levels."""
    steps = AdaptiveSteps([0, MODEL, DEPTH], sizes={MODEL: [4]}, model_steps=MODEL)
    ranks = [[1, 2, 5], [1, 2, 3, 4]]
    for _ in range(40):
        told = [15, 7], [3, 4], 2.0, None, ranks, [DEPTH] * 2
        steps.observe(2, DEPTH, *told, of_text=[False, True])
        steps.observe(2, 0, [0, 0], [0, 0], 1.0)
    assert isinstance(steps.costs, RunningCosts)
    assert steps.costs.of(2, (3 + 7) / 2) == 2.0
    assert steps.costs.of(2, 2.5) == 1.5
    acceptance = steps.acceptance
    assert isinstance(acceptance, HybridAcceptance)
    assert acceptance.is_told
    assert acceptance.model.chances() == pytest.approx([1.0] * MODEL, abs=0.1)
    assert acceptance.model.chances(4)[2] == pytest.approx(0.0, abs=0.1)
    assert len(acceptance.chances(4)) == DEPTH


def test_drafts_of_one_source_are_learned_as_ever() -> None:
    assert isinstance(make_acceptance(DEPTH, None), Acceptance)
    one, other = Acceptance(MODEL), HybridAcceptance(DEPTH, MODEL)
    for accepted in ([3, 1], [0, 2]):
        for acceptance in (one, other.model):
            acceptance.observe(MODEL, RoundObservation([3, 3], accepted))
    assert one.chances() == other.model.chances()


@dataclass
class Beside:
    """A request at a time: of a share of the rounds it has text, for which the model is not run."""

    text_share: float
    model: Sequence[float]  # acceptance by place
    text: Sequence[float]
    level: float = 0.4  # seconds of the model's, beside 1 of the target's
    random: random.Random = field(default_factory=lambda: random.Random(3))
    seconds: float = 0.0
    plain_seconds: float = 0.0  # that plain decoding takes for the same tokens

    def run(self, steps: AdaptiveSteps, rounds: int) -> list[int]:
        return [self._round(steps) for _ in range(rounds)]

    def _round(self, steps: AdaptiveSteps) -> int:
        depth, is_text = steps.choose(1).num_steps, self.random.random() < self.text_share
        levels = depth if is_text else min(depth, MODEL)
        stands = (self.random.random() < one for one in (self.text if is_text else self.model))
        accepted = next((n for n, one in enumerate(stands) if not one or n == levels), levels)
        seconds = 1.0 + 0.01 * levels + (0.0 if is_text else self.level * levels)
        steps.observe(1, depth, [levels], [accepted], seconds, of_text=[is_text])
        self.seconds, self.plain_seconds = self.seconds + seconds, self.plain_seconds + 1 + accepted
        return depth


def chosen(model_steps: int | None, *world: Any) -> set[int]:
    """What each of a few comes to choose most often. model_steps: None where it is not told."""
    found = set()
    for seed in range(6):
        beside = Beside(*world, random=random.Random(seed))
        steps = AdaptiveSteps([0, 1, 2, MODEL, DEPTH], RunningCosts(), model_steps=model_steps)
        beside.run(steps, 400)
        found.add(Counter(beside.run(steps, 800)).most_common(1)[0][0])
    return found


def test_text_that_is_seldom_there_does_not_pay_for_a_model_that_loses() -> None:
    """What stands of text goes deep and costs little, which is not what a model's rounds are."""
    world = 0.1, [0.7] * MODEL, ALL, 0.9
    assert chosen(MODEL, *world) == {0}
    assert chosen(None, *world) == {0, DEPTH}, "so it needs to be told"


def test_text_that_is_often_there_is_drafted_to_its_end() -> None:
    world = 0.3, [0.5] * MODEL, ALL, 0.3
    assert chosen(MODEL, *world) == {DEPTH}
    assert chosen(None, *world) == {2, DEPTH}, "so it needs to be told"


def test_a_model_that_pays_drafts_where_text_is_seldom_there() -> None:
    assert min(chosen(MODEL, 0.02, [0.9] * MODEL, ALL, 0.05)) >= MODEL


def test_a_useless_model_costs_two_percent_at_most() -> None:
    world = Beside(0.02, NONE, ALL)
    steps = AdaptiveSteps([0, 1, 2, MODEL, DEPTH], RunningCosts(), model_steps=MODEL)
    world.run(steps, 3000)
    assert world.seconds < 1.02 * world.plain_seconds
