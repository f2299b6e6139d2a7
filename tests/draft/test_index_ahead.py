"""Lookup drafters: text that was indexed ahead of a draft changes no draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.core.request import Req
from specengine.draft.hybrid import HybridDrafter
from tests.support.draft_batches import (
    begin,
    decode_batch,
    drafter,
    finish,
    nodes,
    request,
    suffix_drafter,
)

MAKE: dict[str, Callable[[], Any]] = {
    "NGRAM": drafter,
    "NGRAM, tree": lambda: drafter(ngram_branches=2),
    "NGRAM, corpus": lambda: drafter(ngram_shared_corpus=True),
    "SUFFIX": suffix_drafter,
    "SUFFIX, corpus": lambda: suffix_drafter(suffix_shared_corpus=True),
    "hybrid": lambda: HybridDrafter(drafter(), suffix_drafter(min_match=4)),
}
RUNS = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=6)


def texts(made: Any) -> list[dict[Req, Any]]:
    parts = [made.inner, made.suffix] if isinstance(made, HybridDrafter) else [made]
    return [part._texts for part in parts]


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=60)
@given(RUNS, RUNS, st.integers(1, 4))
def test_index_ahead_changes_no_draft(
    name: str, runs: list[list[int]], others: list[list[int]], most: int
) -> None:
    lazy, eager = MAKE[name](), MAKE[name]()
    req, gone = request([0, 1, 2], [0, 1]), request([2], [0, 1, 1, 2, 0])
    for made in (lazy, eager):
        begin(made, req)
        begin(made, gone)
    finish(gone)
    for place, run in enumerate(runs):
        req.output_ids += run
        for _ in range(len(others[place % len(others)])):
            eager.index_ahead(req, most)
        if place == 2:
            lazy.release(gone)
            eager.release(gone)
    batch = decode_batch([req])
    assert nodes(eager.draft(batch)) == nodes(lazy.draft(batch))


@pytest.mark.parametrize("name", MAKE)
def test_index_ahead_takes_at_most_so_many_tokens(name: str) -> None:
    made, req = MAKE[name](), request([5, 6], [7])
    begin(made, req)
    req.output_ids += range(10, 20)
    for known in (4, 8, 12, 13, 13):
        made.index_ahead(req, 4)
        for text in texts(made):
            assert text[req].num_tokens == known


@pytest.mark.parametrize("name", MAKE)
def test_index_ahead_keeps_nothing_of_unknown_requests(
    name: str,
) -> None:
    made, req = MAKE[name](), request([1, 2, 1], [2])
    assert made.drafts_on == "lookup"
    made.index_ahead(req, 9)
    assert not any(texts(made))
    begin(made, req)
    made.release(req)
    made.index_ahead(req, 9)
    assert not any(texts(made))
