"""How often drafts stand where a text's take the place of a model's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, compress
from operator import mul, not_
from typing import TypeVar

from specengine.engine.adaptive.acceptance import RunningShare, conditional
from specengine.engine.adaptive.tree_acceptance import Outcomes, TreeAcceptance

T = TypeVar("T")

_OF_TEXT = 0.5  # the share of drafts, before anything is known


class MixedAcceptance:
    """As TreeAcceptance, of drafts from two sources, each of which is learned by itself. How deep
    to draft is chosen for both at once; the model goes no deeper than it can. So whatever stands of
    deeper places is text's, and counts for as many requests as have text."""

    def __init__(
        self, depth: int, model_steps: int, sizes: Sequence[int] = (), pads: bool = False
    ) -> None:
        """depth: of text, at least model_steps. sizes: as to TreeAcceptance. pads: rounds cost as
        if all requests drafted as deep as the deepest, as they do in graphs."""
        self._pads = pads
        self.model = TreeAcceptance(model_steps, sizes)
        self.text = TreeAcceptance(depth, sizes)
        self._texts = RunningShare(_OF_TEXT)  # of requests

    @property
    def is_told(self) -> bool:
        return self.model.is_told or self.text.is_told

    @property
    def coverage(self) -> float:
        texts = self._texts.value
        return texts + (1.0 - texts) * self.model.coverage

    @property
    def text_share(self) -> float:
        """Of the drafts."""
        return self._texts.value / self.coverage if self.coverage else 0.0

    def mean_levels(self, num_steps: int, batch_size: int = 1) -> float:
        """Of those that draft, where so many are asked for."""
        own = min(num_steps, self.model.depth)
        share = self.text_share
        if self._pads:  # the chance that anybody has text
            share = 1.0 - (1.0 - self._texts.value) ** batch_size
        return own + share * (num_steps - own)

    def levels(self, num_steps: int, outcomes: Outcomes) -> list[int]:
        """As TreeAcceptance. Nodes of a model's trees do not tell how deep these are. Graphs deeper
        than the model are as deep as was chosen, however short the text."""
        own = min(num_steps, self.model.depth)
        most = [num_steps if mark else own for mark in _marks(outcomes)]
        found = [*map(min, outcomes.levels, most)]
        if not self._pads:
            return found
        deepest = max(found)
        return [num_steps if deepest > own else deepest] * len(found)

    def observe(self, num_steps: int, outcomes: Outcomes) -> None:
        pairs = zip(_marks(outcomes), outcomes.levels, strict=True)
        is_text = [mark and level > 0 for mark, level in pairs]
        self._texts.add(len(is_text), sum(is_text), outcomes.rounds)
        is_own = [*map(not_, is_text)]
        if any(is_own):
            most = min(num_steps, self.model.depth)
            self.model.observe(most, _part(outcomes, is_own))
        if any(is_text):
            self.text.observe(num_steps, _part(outcomes, is_text))

    def chances(self, num_nodes: int | None = None) -> list[float]:
        """[depth], in 0..1, as TreeAcceptance."""
        return self.by_size([num_nodes])[num_nodes]

    def by_size(self, sizes: Iterable[int | None]) -> dict[int | None, list[float]]:
        """As TreeAcceptance."""
        sizes, share = list(sizes), self.text_share
        texts, models = self.text.by_size(sizes), self.model.by_size(sizes)
        found: dict[int | None, list[float]] = {}
        for size in sizes:
            own = [*accumulate(models[size], mul)]
            own += [0.0] * (self.text.depth - len(own))
            pairs = zip(own, accumulate(texts[size], mul), strict=True)
            found[size] = conditional(
                share * said + (1.0 - share) * guessed for guessed, said in pairs
            )
        return found


def acceptance_of(
    depth: int, model_steps: int | None, sizes: Sequence[int] = (), pads: bool = False
) -> TreeAcceptance | MixedAcceptance:
    """model_steps: how deep a model drafts beside text; None: all drafts have one source."""
    if model_steps is None:
        return TreeAcceptance(depth, sizes)
    return MixedAcceptance(depth, model_steps, sizes, pads)


def _marks(outcomes: Outcomes) -> Sequence[bool]:
    return outcomes.of_text or [False] * len(outcomes.drafted)


def _part(outcomes: Outcomes, kept: Sequence[bool]) -> Outcomes:
    def of(column: Sequence[T]) -> list[T]:
        return [*compress(column, kept)]

    ranks, limits = outcomes.ranks, outcomes.limits
    return replace(
        outcomes,
        drafted=of(outcomes.drafted),
        accepted=of(outcomes.accepted),
        ranks=None if ranks is None else of(ranks),
        limits=None if limits is None else of(limits),
    )
