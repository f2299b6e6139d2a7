"""Which multiprocessors a kernel's blocks are told to sit on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specengine.kernels.cuda.sm_placement import MOST_SMS, SMPlacement

CPU = torch.device("cpu")
CAME = [6, 7, 2, 3, 0, 1, 4, 5]  # by blockIdx, where blocks came by themselves


def choose(seats: SMPlacement, came: list[int], seconds: Callable[[dict[int, int]], float]) -> int:
    """seconds: of a launch, by the multiprocessors of numbers -> launches but for the timed."""
    launches = 0

    def launch() -> None:
        nonlocal launches
        launches += 1
        for block, seat in enumerate(came):
            if int(seats.numbers[seat]) < 0:
                seats.seen[block] = seat

    seats.choose(launch, lambda given: seconds(numbers_of(seats)))
    return launches


def numbers_of(seats: SMPlacement) -> dict[int, int]:
    """Multiprocessors by number."""
    return {number: seat for seat, number in enumerate(seats.numbers.tolist()) if number >= 0}


@pytest.mark.parametrize("fastest", [6, 2, 0, 4])
def test_the_fastest_of_the_ways_is_kept_to(fastest: int) -> None:
    """Each goes on as blocks came, and begins elsewhere."""
    seats = SMPlacement(8, CPU)
    assert choose(seats, CAME, lambda of: 1.0 if of[0] == fastest else 2.0) == 1
    first = CAME.index(fastest)
    assert [numbers_of(seats)[number] for number in range(8)] == [*CAME[first:], *CAME[:first]]
    assert seats.are_chosen


@pytest.mark.parametrize("came", [[0, 1, 2, 2], [0, 1, 2, MOST_SMS], [0, 1, 2, -1]])
def test_what_is_no_block_on_each_multiprocessor_is_left_alone(came: list[int]) -> None:
    seats = SMPlacement(4, CPU)
    seats.seen[:] = torch.tensor(came)
    choose(seats, [], lambda of: 1.0)
    assert seats.are_chosen
    assert numbers_of(seats) == {}


def test_launches_of_one_kind_share_a_choice() -> None:
    assert SMPlacement.of(("one", 1), 4, CPU) is SMPlacement.of(("one", 1), 4, CPU)
    assert SMPlacement.of(("one", 1), 4, CPU) is not SMPlacement.of(("one", 2), 4, CPU)
