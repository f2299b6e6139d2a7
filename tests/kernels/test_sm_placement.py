"""Which multiprocessors a kernel's blocks are told to sit on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specengine.kernels.cuda.sm_placement import MOST_SMS, SMPlacement

CPU = torch.device("cpu")
CAME = [6, 7, 2, 3, 0, 1, 4, 5]  # by blockIdx, where blocks came by themselves


def choose(
    placement: SMPlacement, came: list[int], seconds: Callable[[dict[int, int]], float]
) -> int:
    """seconds: of a launch, by the multiprocessors of numbers -> launches but for the timed."""
    launches = 0

    def launch() -> None:
        nonlocal launches
        launches += 1
        for block, sm in enumerate(came):
            if int(placement.numbers[sm]) < 0:
                placement.seen[block] = sm

    placement.choose(launch, lambda given: seconds(numbers_of(placement)))
    return launches


def numbers_of(placement: SMPlacement) -> dict[int, int]:
    """Multiprocessors by number."""
    return {number: sm for sm, number in enumerate(placement.numbers.tolist()) if number >= 0}


@pytest.mark.parametrize("fastest", [6, 2, 0, 4])
def test_the_fastest_of_the_ways_is_kept_to(fastest: int) -> None:
    """Each goes on as blocks came, and begins elsewhere."""
    placement = SMPlacement(8, CPU)
    assert choose(placement, CAME, lambda of: 1.0 if of[0] == fastest else 2.0) == 1
    first = CAME.index(fastest)
    assert [numbers_of(placement)[number] for number in range(8)] == [*CAME[first:], *CAME[:first]]
    assert placement.are_chosen


@pytest.mark.parametrize("came", [[0, 1, 2, 2], [0, 1, 2, MOST_SMS], [0, 1, 2, -1]])
def test_what_is_no_block_on_each_multiprocessor_is_left_alone(came: list[int]) -> None:
    placement = SMPlacement(4, CPU)
    placement.seen[:] = torch.tensor(came)
    choose(placement, [], lambda of: 1.0)
    assert placement.are_chosen
    assert numbers_of(placement) == {}


def test_launches_of_one_kind_share_a_choice() -> None:
    assert SMPlacement.of(("one", 1), 4, CPU) is SMPlacement.of(("one", 1), 4, CPU)
    assert SMPlacement.of(("one", 1), 4, CPU) is not SMPlacement.of(("one", 2), 4, CPU)
