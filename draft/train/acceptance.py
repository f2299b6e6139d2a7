"""What serving would accept of a drafter, read off an unrolled forward: no engine needed.

Where documents are the target's own greedy answers, a chain drafted at any row goes on through the
document as long as its tokens are accepted. So an answer can be walked through in rounds, as the
engine does it: draft, count what is accepted, go on behind the bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Judged:
    """R rows of a batch. Row i drafts the token i + k + 2 at step k, past the root i + 1."""

    matches: Bools  # [K, R], the draft's best token is the target's
    missed: Bools  # [K, R], the target's best token is not in the draft vocabulary
    greedy: Bools  # [R], whether token i + 1 is the target's best there
    answers: Bools  # [R], tokens that the target generated
    lens: list[int]  # rows a document


@dataclass
class WalkCounts:
    """Sums over rounds, by position in the chain, [K]."""

    num_steps: int
    drafted: NDArray[np.int64] = field(init=False)  # those verified, all before them accepted
    accepted: NDArray[np.int64] = field(init=False)
    missed: NDArray[np.int64] = field(init=False)  # rejected for want of the token

    def __post_init__(self) -> None:
        self.drafted, self.accepted, self.missed = np.zeros((3, self.num_steps), dtype=np.int64)


def walk(judged: Judged, num_steps: int) -> WalkCounts:
    """Rounds of chains of num_steps through every answer. A token that the target would not have
    said greedily ends a round behind it without a verdict on what would have followed."""
    counts = WalkCounts(num_steps)
    for begin, length in zip(accumulate(judged.lens, initial=0), judged.lens, strict=False):
        for first, end in _answers(judged.answers[begin : begin + length]):
            root = max(first, 1)  # row 0 drafts past token 1
            while root + 1 < end:
                root += _round(judged, counts, begin, root, end)
    return counts


def _round(judged: Judged, counts: WalkCounts, begin: int, root: int, end: int) -> int:
    """One round from a root -> tokens emitted."""
    row = begin + root - 1
    for step in range(min(counts.num_steps, end - root - 1)):
        counts.drafted[step] += 1
        if not judged.matches[step, row]:
            counts.missed[step] += judged.missed[step, row]
            return step + 1
        counts.accepted[step] += 1
        if not judged.greedy[row + step + 1]:
            return step + 1
    return min(counts.num_steps, end - root - 1) + 1


def _answers(answers: Bools) -> list[tuple[int, int]]:
    """Where each run of answer tokens begins and ends."""
    edges = np.diff(np.concatenate(([False], answers, [False])).astype(np.int8))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def accepted_length(rates: list[float]) -> float:
    """tau of a chain, the bonus token included, from the share accepted at each position of those
    that came so far."""
    return 1.0 + float(np.cumprod(rates).sum())
