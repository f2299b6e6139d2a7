"""Sums of two ranks, each a thread with a library of its own, on a CPU: bits, turns and slots."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Timer

import pytest
import torch
from torch import Tensor

from specengine.core.parallel import communicator, split_over
from specengine.kernels.ranks import pair_sum
from specengine.kernels.ranks.pair_sum import PairSum
from tests.halves import thinned
from tests.kernels.emulated_cuda import Compiled
from tests.support.pretended_ranks import PretendedRanks, on_threads

Call = tuple[Tensor, Tensor, Tensor | None]  # what each rank has, and the stream


@dataclass(frozen=True)
class Pair:
    """Both ranks' sides, and the memory that the other writes into."""

    sides: tuple[PairSum, PairSum]
    mailboxes: tuple[Tensor, Tensor]

    def run(
        self, calls: list[Call], delays: Callable[[random.Random], float]
    ) -> list[list[Tensor]]:
        """What all calls give on each rank. delays: seconds before a call."""

        def one() -> list[Tensor]:
            rank = communicator().rank
            drawn, found = random.Random(rank), []
            for call in calls:
                time.sleep(delays(drawn))
                found.append(self.sides[rank](call[rank], call[2], gives_up_after=20))
            return found

        return on_threads(2, one)


def made(largest_in_words: int, bare_chunks: int) -> Pair:
    a, b = (torch.zeros(pair_sum.MAILBOX, dtype=torch.uint8) for _ in range(2))
    sides = (PairSum(*given, largest_in_words, bare_chunks) for given in ((a, b), (b, a)))
    return Pair((next(sides), next(sides)), (a, b))


ALL = pair_sum.LARGEST  # bytes in words: each sum


@pytest.fixture(params=[(ALL, 4), (0, 1), (0, 2), (0, 4)], ids=["words", "bare1", "bare2", "bare4"])
def pair(
    request: pytest.FixtureRequest, emulated_pair: Compiled, monkeypatch: pytest.MonkeyPatch
) -> Pair:
    """Of one form."""
    monkeypatch.setattr(pair_sum, "compiled", emulated_pair)
    return made(*request.param)


@pytest.fixture(params=[1, 4])
def mixed_pair(
    request: pytest.FixtureRequest, emulated_pair: Compiled, monkeypatch: pytest.MonkeyPatch
) -> Pair:
    """Of both forms: words carry sums of at most 4 KiB."""
    monkeypatch.setattr(pair_sum, "compiled", emulated_pair)
    return made(4096, request.param)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, with_stream: bool) -> Call:
    """Of very different sizes, so that each rounding shows."""
    a, b, stream = (
        (torch.randn(shape) * torch.randn(shape).mul(4).exp()).to(dtype) for _ in range(3)
    )
    return a, b, stream if with_stream else None


def expected(call: Call) -> Tensor:
    summed = call[0] + call[1]
    return summed if call[2] is None else call[2] + summed


def at_once(_: random.Random) -> float:
    return 0.0


def now_and_then(own: random.Random) -> float:
    """A call takes a millisecond or two."""
    return own.choice([0.0, 0.0, 0.0, 0.008])


@pytest.mark.parametrize(("dtype", "with_stream"), thinned(2, pair_sum.DTYPES, [False, True]))
def test_sum_has_the_bits_of_separate_operations(
    pair: Pair, dtype: torch.dtype, with_stream: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(1, 8), (1, 576), (3, 1048), (4, 520)]
    calls = [drawn(shape, dtype, with_stream) for shape in shapes]
    for found in pair.run(calls, at_once):
        for one, call in zip(found, calls, strict=True):
            assert torch.equal(one, expected(call))


def test_calls_of_varying_sizes_keep_their_turns_when_ranks_are_late(pair: Pair) -> None:
    torch.manual_seed(1)
    drawing = random.Random(2)
    calls = [
        drawn((drawing.choice([1, 2, 5]), 640), dtype, drawing.random() < 0.5)
        for dtype in drawing.choices(pair_sum.DTYPES, k=40)
    ]
    for found in pair.run(calls, now_and_then):
        assert all(torch.equal(one, expected(call)) for one, call in zip(found, calls, strict=True))


def test_calls_of_alternating_forms_keep_their_turns_when_ranks_are_late(mixed_pair: Pair) -> None:
    """Blocks take part in turns of their own: sizes of each form have one block to five."""
    torch.manual_seed(3)
    drawing = random.Random(4)
    calls = [
        drawn((drawing.choice([1, 2, 3, 5, 16]), 1032), dtype, drawing.random() < 0.5)
        for dtype in drawing.choices(pair_sum.DTYPES, k=60)
    ]
    sizes = [call[0].numel() * call[0].itemsize for call in calls]
    assert {size <= 4096 for size in sizes} == {False, True}
    for found in mixed_pair.run(calls, now_and_then):
        assert all(torch.equal(one, expected(call)) for one, call in zip(found, calls, strict=True))


def test_sum_waits_for_each_word_of_a_chunk(
    emulated_pair: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the four that the other rank sends, each comes once later than the others."""
    monkeypatch.setattr(pair_sum, "compiled", emulated_pair)
    pair, call = made(ALL, 4), drawn((1, 512), torch.float32, False)
    pair.sides[0](call[0], gives_up_after=0)
    words = pair.mailboxes[1][: pair_sum._WORDS_AREA].view(torch.int64)
    of_block = words.view(2, -1, 2, pair_sum._THREADS, 2)[:, 0]
    for late in (of_block[:, half, :, word] for half in range(2) for word in range(2)):
        sent = late.clone()
        late.zero_()
        pair.sides[1]._turns.zero_()
        arrival = Timer(0.01, late.copy_, [sent])
        arrival.start()
        with split_over(PretendedRanks(2, 1)):
            found = pair.sides[1](call[1], gives_up_after=1)
        arrival.join()
        assert torch.equal(found, expected(call))


def test_turns_go_on_beyond_32_bits(pair: Pair) -> None:
    for side in pair.sides:
        side._turns.fill_(-4)
    call = drawn((1, 64), torch.float32, True)
    for found in pair.run([call] * 8, at_once):
        assert all(torch.equal(one, expected(call)) for one in found)


def test_data_of_a_turn_stay_while_the_sender_is_one_turn_ahead(pair: Pair) -> None:
    first, second = (drawn((1, 520), torch.float32, False) for _ in range(2))
    for call in (first, second):  # it does not wait, and would not begin a third one
        pair.sides[0](call[0], gives_up_after=0)
    with split_over(PretendedRanks(2, 1)):
        for call in (first, second):
            assert torch.equal(pair.sides[1](call[1], gives_up_after=0), expected(call))


def test_bare_data_never_lie_where_words_are_looked_for(mixed_pair: Pair) -> None:
    """They may look like words of any turn."""
    x = drawn((1, 1032), torch.float32, False)[0]
    for _ in range(2):  # both slots
        mixed_pair.sides[0](x, gives_up_after=0)
    areas = [pair_sum._WORDS_AREA, pair_sum._BARE_AREA]
    words, bare = mixed_pair.mailboxes[1].split(areas)
    assert not words.any()
    assert bare.any()


def test_rank_that_is_alone_gives_up_where_it_may(pair: Pair) -> None:
    x = drawn((1, 64), torch.bfloat16, False)[0]
    assert pair.sides[0](x, gives_up_after=0).shape == x.shape


def test_operands_that_are_not_aligned_or_contiguous_are_taken(pair: Pair) -> None:
    a, b, stream = (torch.randn(8 * 36 + 1).bfloat16()[1:].view(8, 36)[:, :32] for _ in range(3))
    for found in pair.run([(a, b, stream)], at_once):
        assert torch.equal(found[0], stream + (a + b))


@pytest.mark.parametrize(("size", "bare"), [(1 << 20, 0), ((1 << 20) + 16, 4), (1 << 22, 4)])
def test_form_follows_from_the_size_alone(
    size: int, bare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the type, the shape and the stream are."""
    asked = list[dict[str, int]]()
    grids = list[tuple[int, int, int]]()

    class Noted:
        def launch(self, grid: tuple[int, int, int], *_: object) -> None:
            grids.append(grid)

    def noted(_: object, _name: str, defines: tuple[tuple[str, int], ...], *_rest: int) -> Noted:
        asked.append(dict(defines))
        return Noted()

    monkeypatch.setattr(pair_sum, "compiled", noted)
    a, b = (torch.zeros(pair_sum.MAILBOX, dtype=torch.uint8) for _ in range(2))
    side = PairSum(a, b)
    for dtype in pair_sum.DTYPES:
        x = torch.zeros(1, size // dtype.itemsize, dtype=dtype)
        side(x)
        side(x, x)
    assert {one["BARE"] for one in asked} == {bare}
    assert set(grids) == {(-(-size // (2048 * max(bare, 1))), 1, 1)}


@pytest.mark.parametrize(
    ("shape", "dtype", "is_taken"),
    [
        ((1, 8), torch.bfloat16, True),
        ((512, 4096), torch.bfloat16, True),
        ((512, 4104), torch.bfloat16, False),
        ((1, 9), torch.bfloat16, False),
        ((0, 8), torch.bfloat16, False),
        ((1, 8), torch.float16, False),
        ((256, 4096), torch.float32, True),
    ],
)
def test_other_sizes_and_types_are_refused(
    shape: tuple[int, ...], dtype: torch.dtype, is_taken: bool
) -> None:
    assert pair_sum.takes(torch.empty(shape, dtype=dtype)) is is_taken
