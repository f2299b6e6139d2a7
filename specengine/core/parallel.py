"""How ranks share one model: what they tell each other, and which part of a weight each has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from specengine.core.errors import ConfigError, SpecEngineError

if TYPE_CHECKING:
    from torch import Tensor

    from specengine.core.config import EngineConfig

logger = logging.getLogger(__name__)
T = TypeVar("T")

FAILED_EXIT = 70  # the code with which rank 0's process ends after another rank has


class Communicator(Protocol):
    """Collectives of `size` ranks. All ranks make the same calls, with tensors of one shape, in one
    order, also while a CUDA graph is captured. A collective gives all ranks the same bits: what is
    computed of them alike is alike on all ranks, and no rank has to learn what another decided.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in the shape and dtype of x. May write over x."""
        ...

    def all_reduce_add(self, x: Tensor, stream: Tensor) -> Tensor:
        """``stream + all_reduce(x)``, the sum rounded before the addition. stream: of x's shape and
        dtype, the same on all ranks, not modified. May write over x."""
        return stream + self.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...], by rank."""
        ...

    def greatest(self, numbers: Sequence[int]) -> list[int]:
        """The greatest of each number over ranks. On the host; takes a tenth of a millisecond."""
        ...


class Alone(Communicator):
    """The only rank."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def greatest(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)


def of_each(ranks: Communicator, number: int) -> list[int]:
    """The numbers of all ranks, by rank: at least 0. All ranks call this."""
    return ranks.greatest([number if place == ranks.rank else 0 for place in range(ranks.size)])


def on_all(ranks: Communicator, do: Callable[[], T], what: str, error: type[SpecEngineError]) -> T:
    """What `do` gives, where it fails on no rank. All ranks call this.

    Where it fails on any, all raise: rank 0 what was raised there, for its caller, every
    other rank `error`, and a rank on which it did not fail `error` too. what: "cannot ...", for
    the message. What was done on the other ranks they have to undo.
    """
    failure: Exception | None = None
    try:
        found = do()
    except Exception as raised:  # whatever it is, the other ranks must not go on
        failure = raised
    failed = [rank for rank, one in enumerate(of_each(ranks, int(failure is not None))) if one]
    if failure is None and not failed:
        return found
    if failure is None:
        names = ", ".join(map(str, failed))
        raise error(f"another rank ({names} of {ranks.size}) {what}; its log says why")
    if ranks.rank == 0:
        raise failure
    logger.error("rank %d %s: %s", ranks.rank, what, failure)
    raise error(str(failure)) from failure


class Link(Protocol):
    """What one rank's engine has of the other ranks'. Rank 0 leads: what its callers ask, and
    what it decides by the clock, it sends to the others, which run the same engine in lock-step.

    leads: whether this is rank 0 of several.
    """

    communicator: Communicator
    leads: bool

    def load(self, config: EngineConfig) -> None:
        """Called on rank 0: the others read the weights, too."""
        ...

    def build(self, config: EngineConfig) -> None:
        """Called on rank 0: the others build an engine, too."""
        ...

    def decide(self, make: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """What `make` gives on rank 0. All ranks call it at the same place; the others do not call
        `make`."""
        ...


class NoLink:
    """The link of an engine of one rank."""

    communicator: Communicator = Alone()
    leads = False

    def load(self, config: EngineConfig) -> None: ...

    def build(self, config: EngineConfig) -> None: ...

    def decide(self, make: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        return make()


AS_RANK_0 = "as rank 0 has chosen"  # the reason of a choice, on every other rank


def chosen_on_rank_0(
    link: Link,
    choose: Callable[[], T],
    to_numbers: Callable[[T], tuple[int, ...]],
    from_numbers: Callable[..., T],
) -> T:
    """What `choose` gives on rank 0, where alone it is called. to_numbers: what the other ranks
    receive of it; there, from_numbers(*numbers) takes its place. All ranks call this at the same
    place."""
    if link.communicator.size == 1:
        return choose()
    made: list[T] = []

    def numbers() -> tuple[int, ...]:
        made.append(choose())
        return to_numbers(made[0])

    received = link.decide(numbers)
    return made[0] if made else from_numbers(*received)


_splitting: ContextVar[Communicator] = ContextVar("splitting", default=NoLink.communicator)


def communicator() -> Communicator:
    """The communicator of the ranks that layers made in this thread are split over."""
    return _splitting.get()


@contextmanager
def split_over(ranks: Communicator) -> Iterator[None]:
    """Layers that are made inside hold this rank's part."""
    token = _splitting.set(ranks)
    try:
        yield
    finally:
        _splitting.reset(token)


@dataclass(frozen=True)
class Cut:
    """A rank's part of a checkpoint's tensor: `start` to `stop` of the `whole` along `dim`."""

    dim: int
    start: int
    stop: int
    whole: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def times(self, count: int) -> Cut:
        """The cut of a tensor that has `count` entries for each of these."""
        return Cut(self.dim, self.start * count, self.stop * count, self.whole * count)

    def along(self, dim: int) -> Cut:
        return Cut(dim, self.start, self.stop, self.whole)

    @property
    def ranges(self) -> tuple[Cut, ...]:
        return (self,)


@dataclass(frozen=True)
class JoinedCut:
    """A rank's parts of a checkpoint's tensor in which several lie one below the other. ranges:
    of that tensor, in its order, along the first dimension."""

    ranges: tuple[Cut, ...]
    dim = 0

    @classmethod
    def below(cls, *cuts: Cut) -> JoinedCut:
        """cuts: of each of those that lie there."""
        whole, start, ranges = sum(one.whole for one in cuts), 0, []
        for one in cuts:
            ranges.append(Cut(0, start + one.start, start + one.stop, whole))
            start += one.whole
        return cls(tuple(ranges))

    @property
    def size(self) -> int:
        return sum(one.size for one in self.ranges)

    @property
    def whole(self) -> int:
        return self.ranges[0].whole


AnyCut = Cut | JoinedCut

_TILE = 64  # entries; where ranks cannot have equal parts, they have whole tiles


def even_cut(whole: int, what: str) -> Cut:
    """This rank's part of the first dimension: equal parts where that is possible, else parts that
    differ by a tile, or by one. Raises ConfigError where a rank would have nothing of `what`."""
    ranks = communicator()
    if whole < ranks.size:
        raise ConfigError(f"--tp-size {ranks.size}: {whole} {what} are fewer than ranks")
    unit = _TILE if whole % _TILE == 0 and whole // _TILE >= ranks.size else 1
    if whole % ranks.size == 0:
        unit = whole // ranks.size
    return even_groups(whole // unit).times(unit)


@dataclass(frozen=True)
class HeadCuts:
    """A rank's heads of queries, and those of keys and values that they read."""

    q: Cut
    kv: Cut


def head_cuts(num_heads: int, num_kv_heads: int) -> HeadCuts:
    """Whole groups, of heads that share keys, where there are as many groups as ranks. Else several
    ranks share a group, and each keeps its keys and values. Raises ConfigError where ranks cannot
    share them."""
    ranks, each = communicator(), num_heads // num_kv_heads
    if num_kv_heads >= ranks.size:
        kv = even_groups(num_kv_heads)
        return HeadCuts(kv.times(each), kv)
    sharers = ranks.size // num_kv_heads
    if ranks.size % num_kv_heads or sharers > each:
        raise ConfigError(
            f"--tp-size {ranks.size}: {num_heads} heads that read {num_kv_heads} of keys and values"
            " cannot be shared by so many ranks; take a divisor of the smaller number, or a "
            f"multiple of it up to {num_heads}"
        )
    group, place = divmod(ranks.rank, sharers)
    start, stop = (group * each + each * one // sharers for one in (place, place + 1))
    return HeadCuts(Cut(0, start, stop, num_heads), Cut(0, group, group + 1, num_kv_heads))


def even_heads(num_heads: int) -> Cut:
    """This rank's heads, which share no keys of their own. Raises ConfigError where it would have
    none."""
    ranks = communicator()
    if num_heads < ranks.size:
        raise ConfigError(f"--tp-size {ranks.size}: {num_heads} heads are fewer than ranks")
    return even_groups(num_heads)


def even_groups(count: int) -> Cut:
    """This rank's part of so many things that are not cut, at least as many as ranks."""
    ranks = communicator()
    start, stop = (count * place // ranks.size for place in (ranks.rank, ranks.rank + 1))
    return Cut(0, start, stop, count)


@dataclass(frozen=True)
class VocabularyCut:
    """A rank's tokens: `width` each, fewer on the last rank. Padded to that width, parts meet where
    a whole vocabulary would have them."""

    ranks: Communicator
    width: int
    cut: Cut

    @classmethod
    def of(cls, vocab_size: int) -> VocabularyCut:
        """Raises ConfigError where a rank would have no token."""
        ranks = communicator()
        width = -(-vocab_size // ranks.size)
        start, stop = ranks.rank * width, min((ranks.rank + 1) * width, vocab_size)
        if (ranks.size - 1) * width >= vocab_size:
            raise ConfigError(
                f"--tp-size {ranks.size}: a vocabulary of {vocab_size} tokens cannot be shared by "
                "so many ranks"
            )
        return cls(ranks, width, Cut(0, start, stop, vocab_size))

    @property
    def is_whole(self) -> bool:
        return self.ranks.size == 1
