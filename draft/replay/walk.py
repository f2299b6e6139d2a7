"""Walks over the text of a request as an engine of another setting would have.

Where drafts are not sampled, the text is the same whichever drafter runs: a round at a position
accepts as much of its draft as agrees with what follows there, and the next round begins behind it.
So with a draft recorded at every position, the walk is the run itself.

Where drafts are sampled, the recorded text depends on them. Then the chance of a round beginning
at each position is propagated: a round that begins there accepts k tokens with the chance that the
rule gives to k, and ends k + 1 further on. Acceptance and text are taken as independent of each
other here, given the drafts above; this makes it an estimate.

Where the trace holds less of a draft than a setting would have drafted, the draft that was
recorded further on takes the place of the rest: an estimate where drafts follow from hidden states,
and not from the text alone.

With drafts at the beginnings of rounds alone, these are used for any setting: an estimate,
unless it is the recorded setting itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specengine.draft.replay.chances import accepted_chances
from specengine.draft.replay.growth import Allowed, Growth, grow, in_order
from specengine.draft.replay.requests import RecordedDraft, RecordedRequest
from specengine.draft.replay.settings import Recorded, ReplaySetting, most_nodes
from specengine.draft.trace.format import Array


@dataclass
class Tally:
    """One request under one setting. rounds and tokens are expected numbers, which may be broken
    ones. sizes: rounds by (levels drafted, nodes verified, root included). unknown: rounds whose
    draft would have gone on beyond what the trace holds of it, just where it agrees with the text
    up to there."""

    rounds: float = 0.0
    tokens: float = 0.0
    unknown: float = 0.0
    sizes: dict[tuple[int, int], float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Round:
    """A round at one position: the chance of each number of accepted tokens."""

    chances: dict[int, float]
    num_levels: int
    num_nodes: int
    unknown: float


class Replay:
    """One request. ranks: int64 [V], the place of each token in a vocabulary by frequency."""

    def __init__(self, request: RecordedRequest, recorded: Recorded, ranks: Array | None) -> None:
        self.request = request
        self.recorded = recorded
        self._ranks = ranks
        self._paths: dict[int, list[int]] = {}
        self._growths: dict[tuple[int, int, int | None], Growth] = {}

    @property
    def _is_drawn(self) -> bool:
        return self.recorded.is_sampled and not self.request.is_greedy

    @property
    def _is_in_order(self) -> bool:
        return self.recorded.is_text or self.recorded.is_hybrid

    def run(self, setting: ReplaySetting) -> Tally:
        tally, request = Tally(), self.request
        if not self.recorded.every_position:
            for place in request.drafts:
                if place < request.end:
                    self._add(tally, self._round(place, setting), 1.0, place)
            return tally
        starts: dict[int, float] = {request.first: 1.0}
        for position in range(request.first, request.end):
            chance = starts.pop(position, 0.0)
            if chance > 0.0:
                one = self._round(position, setting)
                self._add(tally, one, chance, position)
                for accepted, share in one.chances.items():
                    after = position + 1 + accepted
                    starts[after] = starts.get(after, 0.0) + chance * share
        return tally

    def _add(self, tally: Tally, one: _Round, chance: float, position: int) -> None:
        """What lies beyond the end of the text is cut, as the engine cuts it."""
        room = self.request.end - position - 1
        mean = sum(min(accepted, room) * share for accepted, share in one.chances.items())
        tally.rounds += chance
        tally.tokens += chance * (1.0 + mean)
        tally.unknown += chance * one.unknown
        size = one.num_levels, one.num_nodes
        tally.sizes[size] = tally.sizes.get(size, 0.0) + chance

    def _round(self, position: int, setting: ReplaySetting) -> _Round:
        draft = self.request.drafts.get(position)
        if draft is None:
            return _Round({0: 1.0}, 0, 1, 0.0)
        limit = min(setting.num_draft_tokens, draft.limit)
        steps = limit - 1 if setting.num_steps is None else min(setting.num_steps, limit - 1)
        kept = self._growth(position, draft, setting).kept(steps, limit)
        levels, num_nodes = 0 if self.recorded.is_text else steps, 1 + len(kept)
        if not (self._is_in_order or self._is_drawn):
            # Where the trace lacks children, others would have been accepted.
            num_nodes = min(limit, most_nodes(steps, setting.topk))
        if self._is_drawn:
            chances = accepted_chances(draft, kept, setting.verify)
            return _Round(dict(enumerate(chances)), levels, num_nodes, 0.0)
        accepted, ends_short = self._match(position, setting, steps, limit)
        return _Round({accepted: 1.0}, levels, num_nodes, float(ends_short))

    def _match(
        self, position: int, setting: ReplaySetting, steps: int, limit: int
    ) -> tuple[int, bool]:
        """Tokens of the draft that agree with the text, and whether the trace ends before they do.
        Then the draft recorded where it ends goes on in its place."""
        draft = self.request.drafts.get(position)
        if draft is None:
            return 0, True
        growth = self._growth(position, draft, setting)
        kept = growth.kept(steps, limit)
        wanted = set(kept)
        path = [node for node in self._path(position, draft) if node in wanted]
        end = path[-1] if path else 0
        is_full = len(kept) + 1 >= limit
        if is_full or end not in growth.short or growth.expanded[end] >= steps:
            return len(path), False
        after = position + len(path)
        if after >= self.request.end or not self._can_say(self._text_at(after), setting):
            return len(path), False
        if not path:
            return 0, True
        more, _ = self._match(after, setting, steps - len(path), limit - len(kept))
        return len(path) + more, True

    def _text_at(self, position: int) -> int:
        return self.request.text[position - self.request.first]

    def _can_say(self, token: int, setting: ReplaySetting) -> bool:
        allowed = self._allowed(setting.vocabulary)
        return allowed is None or allowed(token)

    def _path(self, position: int, draft: RecordedDraft) -> list[int]:
        if position not in self._paths:
            text = self.request.text[position - self.request.first :][: len(draft.tokens)]
            self._paths[position] = draft.path(text)
        return self._paths[position]

    def _growth(self, position: int, draft: RecordedDraft, setting: ReplaySetting) -> Growth:
        key = position, setting.topk, setting.vocabulary
        if key not in self._growths:
            self._growths[key] = self._grow(draft, setting)
        return self._growths[key]

    def _grow(self, draft: RecordedDraft, setting: ReplaySetting) -> Growth:
        if self._is_in_order:
            return in_order(draft)
        is_static = self.recorded.is_static or self._is_drawn
        return grow(draft, setting.topk, is_static, self._allowed(setting.vocabulary))

    def _allowed(self, size: int | None) -> Allowed | None:
        ranks = self._ranks
        if size is None or ranks is None:
            return None
        return lambda token: token >= 0 and bool(ranks[token] < size)
