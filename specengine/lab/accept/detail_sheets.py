"""The tables that explain an accepted length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from specengine.lab.accept.sheet import (
    MOST_COLUMNS,
    NamedRun,
    Sheet,
    find_bucket,
    find_group,
    labels,
    percent,
    rate,
    tau,
)
from specengine.lab.accept.statistics import Group
from specengine.lab.accept.summary import Summary


def detail_sheets(runs: list[NamedRun]) -> Iterator[Sheet]:
    yield _histogram(runs)
    yield _endings(runs)
    yield _grouped("τ by category", "Prompts of one category.", runs, lambda s: s.by_category)
    if any(len(one.summary.by_turn) > 1 for one in runs):
        yield _grouped("τ by turn", "Of a conversation.", runs, lambda s: s.by_turn)
    yield _grouped(
        "τ by context length",
        "Tokens before the round, its root included.",
        runs,
        lambda s: s.by_context,
    )
    yield _grouped(
        "τ by target entropy",
        "Nats, of the target's distribution at temperature 1 after the root: what the first "
        "drafted token is held against.",
        runs,
        lambda s: s.by_entropy,
    )
    yield _decisions(runs)
    if any(one.summary.calibration for one in runs):
        yield _calibration(runs)


def _histogram(runs: list[NamedRun]) -> Sheet:
    shown = min(max(len(one.summary.histogram) for one in runs), MOST_COLUMNS)
    rows = []
    for one in runs:
        counts, rounds = one.summary.histogram, max(one.summary.overall.rounds, 1)
        cells = [*counts[: shown - 1], sum(counts[shown - 1 :])]
        shares = [f"{100 * cell / rounds:.1f}%" for cell in cells]
        rows.append([one.name, *shares, *[""] * (shown - len(shares))])
    last = f"{shown} or more" if any(len(o.summary.histogram) > shown for o in runs) else str(shown)
    columns = ["setting", *map(str, range(1, shown)), last]
    return Sheet("Tokens that a round emits", "Share of all rounds.", columns, rows)


def _endings(runs: list[NamedRun]) -> Sheet:
    rows = []
    for one in runs:
        ends, rounds = one.summary.endings, max(one.summary.overall.rounds, 1)
        counts = (
            ends.rejected,
            ends.outside_vocabulary,
            ends.draft_used_up,
            ends.nothing_drafted,
            ends.answer_ended,
        )
        shares = [f"{100 * count / rounds:.1f}%" for count in counts]
        outside = one.summary.outside_vocabulary
        words = one.setting.draft_vocabulary
        rows.append(
            [
                one.name,
                *shares,
                "the target's" if words is None else f"{words} tokens",
                "" if outside is None else f"{100 * outside:.2f}%",
            ]
        )
    note = (
        "Share of all rounds. Vocabulary miss: the token that the target put in place of a drafted "
        "one is not in the draft's vocabulary; no draft could have been right. The last column is "
        "the share of all emitted tokens that the draft cannot say."
    )
    columns = [
        *("setting", "wrong token", "vocabulary miss", "draft used up", "nothing drafted"),
        *("answer ended", "draft vocabulary", "emitted outside it"),
    ]
    return Sheet("Why rounds emitted no more", note, columns, rows)


def _grouped(
    title: str, note: str, runs: list[NamedRun], groups: Callable[[Summary], Sequence[Group]]
) -> Sheet:
    rows = []
    for label in labels(runs, groups):
        found = [find_group(groups(one.summary), label) for one in runs]
        first = next(group for group in found if group is not None)
        rows.append([label, *map(tau, found), str(first.prompts), str(first.rounds)])
    columns = ["", *(one.name for one in runs), "prompts", f"rounds of {runs[0].name}"]
    return Sheet(title, note, columns, rows)


def _decisions(runs: list[NamedRun]) -> Sheet:
    note = (
        "Conditional acceptance over all positions tried, by the entropy (nats, at temperature 1) "
        "of the target's distribution that decided each."
    )
    rows = [
        [label, *(rate(find_bucket(one.summary.decisions_by_entropy, label)) for one in runs)]
        for label in labels(runs, lambda summary: summary.decisions_by_entropy)
    ]
    return Sheet("Acceptance by target entropy", note, ["", *(one.name for one in runs)], rows)


def _calibration(runs: list[NamedRun]) -> Sheet:
    rows = []
    for one in runs:
        found = one.summary.calibration
        if found is not None:
            rows += [
                [one.name, bin.label, f"{bin.mean:.3f}", percent(bin.rate), str(bin.rate.count)]
                for bin in found.bins
            ]
            rows.append([one.name, "ECE", f"{found.ece:.4f}", "", str(found.nodes)])
    note = (
        "Confidence: the probability that the drafter gives the whole path down to a node. ECE: "
        "the mean distance between confidence and the share accepted, over bins of equal width, "
        "weighted by their nodes."
    )
    columns = ["setting", "confidence", "mean", "accepted", "nodes"]
    return Sheet("Calibration of the draft's confidence", note, columns, rows)
