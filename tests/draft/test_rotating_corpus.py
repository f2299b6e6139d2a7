from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.draft.rotating_corpus import RotatingCorpus, until_separator
from specengine.draft.suffix.tree import SuffixTree

OUTPUTS = st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=30)


def corpus(capacity: int) -> RotatingCorpus[SuffixTree]:
    return RotatingCorpus(capacity, lambda: SuffixTree(8))


@settings(max_examples=150)
@given(OUTPUTS, st.integers(4, 50))
def test_the_latest_outputs_within_capacity(outputs: list[list[int]], capacity: int) -> None:
    made, half = corpus(capacity), capacity // 2
    for number, output in enumerate(outputs):
        made.add(output)
        assert made.num_tokens <= capacity
        tokens = [token for text in reversed(made.texts) for token in text.tokens]
        added = [token for one in outputs[: number + 1] for token in [*one[-(half - 1) :], None]]
        kept = [token if token >= 0 else None for token in tokens]
        assert kept == added[len(added) - len(kept) :]
        assert tokens[-1] < 0


def test_separators_occur_once() -> None:
    made = corpus(100)
    for _ in range(5):
        made.add([1, 2])
    (tree,) = made.texts
    separators = [token for token in tree.tokens if token < 0]
    assert len(set(separators)) == len(separators) == 5
    assert tree.length == 0


def test_until_separator() -> None:
    assert until_separator([1, 2, -3, 4]) == [1, 2]
    assert until_separator([-1]) == []
    assert until_separator([0, 5]) == [0, 5]
