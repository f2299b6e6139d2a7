"""From a table of rounds to numbers with intervals. Pure functions on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specengine.lab.accept.bootstrap import (
    Array,
    Estimate,
    Floats,
    per_prompt,
    ratio,
    ratio_difference,
)
from specengine.lab.accept.rounds import RoundTable

CONTEXT_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens
ENTROPY_EDGES = (0.0, 0.05, 0.25, 0.5, 1.0, 2.0, 4.0)  # nats
NUM_BINS = 10  # of confidence


@dataclass(frozen=True)
class Group:
    """Some of the rounds."""

    label: str
    prompts: int
    rounds: int
    tokens: int
    tau: Estimate  # tokens emitted a round, the bonus included
    first: Estimate  # share of tried first positions that were accepted


@dataclass(frozen=True)
class Position:
    position: int  # 1 is the token after the root
    joint: Estimate  # share of all rounds in which it was accepted
    conditional: Estimate  # share of the rounds in which it was tried
    misses: int  # tried, and the target's token was not in the draft's vocabulary


@dataclass(frozen=True)
class Bucket:
    """Decisions about drafted tokens, by something known of each."""

    label: str
    mean: float  # of that something
    rate: Estimate  # share accepted


@dataclass(frozen=True)
class Calibration:
    """How far stated confidence and truth lie apart. ece: Σ |share accepted - mean confidence|,
    bins weighted by their nodes (Naeini et al. 2015), equal-width bins."""

    ece: float
    nodes: int
    bins: tuple[Bucket, ...]


@dataclass(frozen=True)
class Endings:
    """Why rounds emitted no more than they did; they add up to all rounds."""

    rejected: int  # another token was drafted, and the target's could have been
    outside_vocabulary: int  # another was drafted, and the draft has no word for the target's
    draft_used_up: int  # all that was drafted was accepted
    nothing_drafted: int
    answer_ended: int  # inside the run of accepted tokens


@dataclass(frozen=True)
class Sample:
    """A table, and whose rounds these are. Samples of the same prompts share their drawings."""

    table: RoundTable
    prompts: Array  # int64 [n], of each round
    drawings: Floats  # [D, P]

    def ratio(self, above: Array, below: Array, rounds: Array) -> Estimate:
        """Σ above / Σ below, both one a round, over the rounds in question (bool [n])."""
        return ratio(*self._sums(above, below, rounds), self.drawings)

    def tau(self, rounds: Array) -> Estimate:
        return self.ratio(self.table.emitted, np.ones(len(self.table)), rounds)

    def tau_less(self, other: Sample, rounds: Array, others_rounds: Array) -> Estimate:
        """τ of this sample less that of the other, paired by prompt."""
        return ratio_difference(
            self._tau_sums(rounds), other._tau_sums(others_rounds), self.drawings
        )

    def _tau_sums(self, rounds: Array) -> tuple[Floats, Floats]:
        return self._sums(self.table.emitted, np.ones(len(self.table)), rounds)

    def _sums(self, above: Array, below: Array, rounds: Array) -> tuple[Floats, Floats]:
        prompts, count = self.prompts[rounds], self.drawings.shape[1]
        return per_prompt(above[rounds], prompts, count), per_prompt(below[rounds], prompts, count)


def group(sample: Sample, rounds: Array, label: str) -> Group:
    """rounds: bool [n], which."""
    table = sample.table
    return Group(
        label=label,
        prompts=len(np.unique(sample.prompts[rounds])),
        rounds=int(rounds.sum()),
        tokens=int(table.emitted[rounds].sum()),
        tau=sample.tau(rounds),
        first=sample.ratio(table.stood >= 1, table.tried >= 1, rounds),
    )


def groups_by_value(
    sample: Sample, values: Array, edges: Sequence[float], unit: str = ""
) -> tuple[Group, ...]:
    """values: one a round. Buckets [edge, next edge), the last one open; those without rounds are
    left out."""
    bucket = np.searchsorted(edges, values, side="right") - 1
    return tuple(
        group(sample, bucket == index, bucket_label(edges, index, unit))
        for index in np.unique(bucket)
    )


def bucket_label(edges: Sequence[float], index: int, unit: str = "") -> str:
    low = f"{edges[index]:g}"
    end = f"{low} up" if index + 1 == len(edges) else f"{low} to {edges[index + 1]:g}"
    return f"{end} {unit}".rstrip()


def positions(sample: Sample, known: Array | None) -> tuple[Position, ...]:
    """known: bool [V], the target's tokens that the draft can say; None where it can say all."""
    table = sample.table
    every = np.ones(len(table), dtype=bool)
    missed = is_missed(table, known)
    return tuple(
        Position(
            position=position,
            joint=sample.ratio(table.stood >= position, every, every),
            conditional=sample.ratio(table.stood >= position, table.tried >= position, every),
            misses=int((missed & (table.tried == position)).sum()),
        )
        for position in range(1, int(table.tried.max(initial=0)) + 1)
    )


def is_missed(table: RoundTable, known: Array | None) -> Array:
    """bool [n], rounds whose last tried position was rejected because the target's token there, the
    bonus, is not in the draft's vocabulary."""
    fell = table.tried > table.stood
    if known is None:
        return np.zeros(len(table), dtype=bool)
    bonus = table.tokens[np.arange(len(table)), table.stood]
    missed: Array = fell & ~known[bonus]
    return missed


def endings(table: RoundTable, known: Array | None) -> Endings:
    fell, missed = table.tried > table.stood, is_missed(table, known)
    nothing = (table.num_drafted == 0) & ~table.is_cut
    return Endings(
        rejected=int((fell & ~missed).sum()),
        outside_vocabulary=int(missed.sum()),
        draft_used_up=int((~fell & ~table.is_cut & ~nothing).sum()),
        nothing_drafted=int(nothing.sum()),
        answer_ended=int(table.is_cut.sum()),
    )


def histogram(table: RoundTable) -> tuple[int, ...]:
    """How many rounds emitted 1, 2, … tokens."""
    return tuple(int(count) for count in np.bincount(table.emitted, minlength=2)[1:])


def outside_share(table: RoundTable, known: Array | None) -> float | None:
    """Of the emitted tokens, those that the draft's vocabulary lacks; None where it has all."""
    if known is None:
        return None
    kept = np.arange(table.tokens.shape[1]) < table.emitted[:, None]
    tokens = table.tokens[kept]
    return float((~known[tokens]).mean()) if len(tokens) else None


def decisions_by_entropy(sample: Sample) -> tuple[Bucket, ...]:
    """Every tried position, by the entropy of the target's distribution that decided it."""
    table = sample.table
    place = np.arange(table.entropy.shape[1])
    row, column = (place < table.tried[:, None]).nonzero()
    stood, entropy = column < table.stood[row], table.entropy[row, column]
    prompts = sample.prompts[row]
    bucket = np.searchsorted(ENTROPY_EDGES, entropy, side="right") - 1
    labels = [bucket_label(ENTROPY_EDGES, index) for index in range(len(ENTROPY_EDGES))]
    return tuple(
        _bucket(sample.drawings, prompts, stood, entropy, bucket == index, labels[index])
        for index in np.unique(bucket)
    )


def calibration(sample: Sample) -> Calibration | None:
    """None where the drafter never says how sure it is."""
    nodes = sample.table.nodes
    if len(nodes.row) == 0:
        return None
    prompts = sample.prompts[nodes.row]
    bucket = np.minimum((nodes.confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    bins = tuple(
        _bucket(
            sample.drawings,
            prompts,
            nodes.stood,
            nodes.confidence,
            bucket == index,
            f"{index / NUM_BINS:g} to {(index + 1) / NUM_BINS:g}",
        )
        for index in np.unique(bucket)
    )
    gaps = sum(one.rate.count * abs(one.rate.value - one.mean) for one in bins)
    return Calibration(gaps / len(nodes.row), len(nodes.row), bins)


def _bucket(
    drawings: Floats, prompts: Array, stood: Array, values: Array, chosen: Array, label: str
) -> Bucket:
    count = drawings.shape[1]
    above = per_prompt(stood[chosen], prompts[chosen], count)
    below = per_prompt(np.ones(int(chosen.sum())), prompts[chosen], count)
    mean = float(values[chosen].mean(dtype=np.float64))
    return Bucket(label, mean, ratio(above, below, drawings))
