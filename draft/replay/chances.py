"""How many drafted tokens a rule accepts of a sampled draft: the whole distribution, over the coins
of acceptance, given what was drafted."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.draft.replay.requests import RecordedDraft


def accepted_chances(draft: RecordedDraft, kept: Sequence[int], verify: str) -> list[float]:
    """[1 + depth], the chance of each number of accepted tokens. kept: nodes of the draft, without
    the root, parents among them."""
    if verify == "block":
        return _block(draft, sorted(kept))  # numbered downwards
    wanted, chances = set(kept), [0.0]
    level = [(0, 1.0)]  # nodes that are reached, and the chance that they are
    while level:
        below: list[tuple[int, float]] = []
        for node, reached in level:
            children = [child for child in draft.children[node] if child in wanted]
            shares = _shares(draft, children, verify)
            below += [
                (child, reached * share) for child, share in zip(children, shares, strict=True)
            ]
            chances[-1] += reached * (1.0 - sum(shares))
        level = below
        chances += [0.0] if level else []
    return chances


def _shares(draft: RecordedDraft, children: Sequence[int], verify: str) -> list[float]:
    """The chance of each child to be the accepted one."""
    if verify == "match":
        return [draft.target_probs[child] for child in children]
    assert draft.chances is not None
    shares, left = [], 1.0  # one after the other
    for child in children:
        shares.append(left * draft.chances[child])
        left *= 1.0 - draft.chances[child]
    return shares


def _block(draft: RecordedDraft, chain: list[int]) -> list[float]:
    """Block verification (Sun et al. 2024): the last token whose coin accepts it ends the path."""
    assert draft.draft_probs is not None
    assert draft.missing is not None
    path, stops = 1.0, []
    for node in chain:
        target, drawn = draft.target_probs[node], draft.draft_probs[node]
        path = min(1.0, path * target / drawn) if drawn > 0 else float(path * target > 0)
        if node == chain[-1]:
            stops.append(path)
            continue
        either = draft.missing[node] + 1.0 - path
        stops.append(draft.missing[node] / either if either > 0 else 1.0)
    chances, beyond = [0.0] * (len(chain) + 1), 1.0
    for place in range(len(chain), 0, -1):
        chances[place] = beyond * stops[place - 1]
        beyond *= 1.0 - stops[place - 1]
    chances[0] = beyond
    return chances
