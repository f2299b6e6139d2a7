"""The accepted length and the speed of every setting, out of one trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specengine.core.errors import DataError
from specengine.draft.replay.requests import RecordedRequest, read_requests
from specengine.draft.replay.settings import Recorded, ReplaySetting
from specengine.draft.replay.vocabulary import ranks_from_file, ranks_from_others
from specengine.draft.replay.walk import Replay, Tally
from specengine.draft.trace.format import Array
from specengine.draft.trace.reader import Trace
from specengine.lab.accept.bootstrap import Estimate, Floats, draw_prompts, ratio
from specengine.lab.replay.cost import CostTable

_DRAWINGS = 1000


@dataclass(frozen=True)
class Speed:
    """By a table of step costs. tokens_per_second: of one request."""

    round_ms: float
    tokens_per_second: float
    speedup: Estimate  # over plain decoding


@dataclass(frozen=True)
class Row:
    """tau: tokens emitted a round, bonus included. nodes: verified a round, root included. unknown:
    share of rounds in which the trace holds less of the draft than the setting would have had."""

    setting: ReplaySetting
    tau: Estimate
    rounds: float
    nodes: float
    unknown: float
    is_exact: bool
    speed: Speed | None
    is_best: bool = False  # no other setting has as few nodes (costs as little) and a higher tau


def replay(
    trace: Trace,
    settings: Sequence[ReplaySetting],
    costs: CostTable | None = None,
    vocabulary: Path | None = None,
    seed: int = 0,
    done: Callable[[ReplaySetting], None] = lambda setting: None,
) -> list[Row]:
    """vocabulary: token ids by frequency; None ranks them by the outputs of the other requests.
    Raises DataError for a trace without rounds, or costs outside of the table."""
    recorded, requests = Recorded.of(trace.header), read_requests(trace)
    if not requests:
        raise DataError("the trace holds no rounds")
    replays = [
        Replay(request, recorded, ranks)
        for request, ranks in zip(
            requests, _ranks(trace, requests, settings, vocabulary), strict=True
        )
    ]
    drawings = draw_prompts(np.zeros(len(requests)), _DRAWINGS, seed)
    rows = []
    for setting in settings:
        tallies = [one.run(setting) for one in replays]
        rows.append(_row(setting, recorded, tallies, drawings, costs))
        done(setting)
    return mark_best(rows)


def mark_best(rows: Sequence[Row]) -> list[Row]:
    """With step costs the price is the time of a round, without it its nodes."""
    return [replace(row, is_best=not any(_beats(other, row) for other in rows)) for row in rows]


def price(row: Row) -> float:
    return row.nodes if row.speed is None else row.speed.round_ms


def _beats(other: Row, row: Row) -> bool:
    pairs = [(price(row), price(other)), (other.tau.value, row.tau.value)]
    return all(x >= y for x, y in pairs) and any(x > y for x, y in pairs)


def _ranks(
    trace: Trace,
    requests: list[RecordedRequest],
    settings: Sequence[ReplaySetting],
    vocabulary: Path | None,
) -> Sequence[Array | None]:
    size = trace.header["vocab_size"]
    if all(setting.vocabulary is None for setting in settings):
        return [None] * len(requests)
    if vocabulary is not None:
        return [ranks_from_file(vocabulary, size)] * len(requests)
    return ranks_from_others(requests, size)


def _row(
    setting: ReplaySetting,
    recorded: Recorded,
    tallies: list[Tally],
    drawings: Floats,
    costs: CostTable | None,
) -> Row:
    rounds = np.array([one.rounds for one in tallies])
    tokens = np.array([one.tokens for one in tallies])
    total = float(rounds.sum())
    unknown = sum(one.unknown for one in tallies) / total
    nodes = sum(size[1] * weight for one in tallies for size, weight in one.sizes.items())
    follows_text = recorded.every_position and not recorded.is_sampled
    return Row(
        setting=setting,
        tau=ratio(tokens, rounds, drawings),
        rounds=total,
        nodes=nodes / total,
        unknown=unknown,
        is_exact=unknown == 0 and (follows_text or _is_recorded(setting, recorded)),
        speed=None if costs is None else _speed(setting, tallies, tokens, drawings, costs),
    )


def _is_recorded(setting: ReplaySetting, recorded: Recorded) -> bool:
    """Rounds as they ran, and nothing else."""
    return setting == recorded.setting and not recorded.every_position and not recorded.is_sampled


def _speed(
    setting: ReplaySetting,
    tallies: list[Tally],
    tokens: Array,
    drawings: Floats,
    costs: CostTable,
) -> Speed:
    times = np.array(
        [
            sum(
                weight * costs.of_round(levels, setting.topk, nodes)
                for (levels, nodes), weight in one.sizes.items()
            )
            for one in tallies
        ]
    )
    rounds = sum(one.rounds for one in tallies)
    return Speed(
        round_ms=float(times.sum()) / rounds,
        tokens_per_second=1000.0 * float(tokens.sum() / times.sum()),
        speedup=ratio(tokens * costs.plain, times, drawings),
    )
