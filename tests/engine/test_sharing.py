"""A step of an engine that shares experts with others."""

from __future__ import annotations

import pytest

from specengine.core.errors import EngineStoppedError
from specengine.core.sharing import ExpertSharers
from specengine.engine.sharing import shared_step
from specengine.runner.communicators.lost import RanksLostError
from tests.support.pretended_ranks import PretendedRanks

ENGINES, ALL_RANKS, OWN_RANKS = PretendedRanks(2), PretendedRanks(4), PretendedRanks(2)


def step_that_raises(error: Exception) -> None:
    def step() -> None:
        raise error

    shared_step(ExpertSharers(ENGINES, ALL_RANKS), step, lambda: False)


@pytest.mark.parametrize("lost", [ENGINES, ALL_RANKS])
def test_step_amid_which_another_engine_ends_stops(lost: PretendedRanks) -> None:
    """Whatever PyTorch calls that."""
    with pytest.raises(EngineStoppedError, match="another engine that shares experts has ended"):
        step_that_raises(RanksLostError("gone", lost))


@pytest.mark.parametrize(
    "error", [RanksLostError("gone", OWN_RANKS), RuntimeError("Connection pool is empty")]
)
def test_step_that_fails_otherwise_raises_what_it_raised(error: RuntimeError) -> None:
    """Ranks of the engine's own are watched, and their end is named, elsewhere."""
    with pytest.raises(RuntimeError) as raised:
        step_that_raises(error)
    assert raised.value is error
