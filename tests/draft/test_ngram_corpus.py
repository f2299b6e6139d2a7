from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specengine.draft.ngram.corpus import SharedCorpus


def found(corpus: SharedCorpus, tail: list[int], length: int = 3) -> list[list[int]]:
    return list(corpus.continuations(tail, length))


def test_latest_output_first_and_never_across_outputs() -> None:
    corpus = SharedCorpus(100, 2, 4)
    corpus.add([1, 2, 3])
    corpus.add([4, 1, 2, 5, 6, 7, 8])
    assert found(corpus, [1, 2]) == [[5, 6, 7], [3]]
    assert found(corpus, [3, 4]) == []
    assert found(corpus, [2, 3]) == []


def test_the_oldest_outputs_go_first() -> None:
    corpus = SharedCorpus(20, 2, 4)
    outputs = [[i, i + 1, i + 2, i + 3] for i in (10, 20, 30, 40, 50)]
    for output in outputs:
        corpus.add(output)
    kept = [output for output in outputs if found(corpus, output[:2])]
    assert kept == outputs[-len(kept) :]
    assert 2 <= len(kept) < len(outputs)


def test_only_the_end_of_a_huge_output_is_kept() -> None:
    corpus = SharedCorpus(20, 2, 4)
    corpus.add(list(range(100)))
    assert found(corpus, [0, 1]) == []
    assert found(corpus, [95, 96], 2) == [[97, 98]]


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=30), st.integers(4, 50))
def test_never_above_capacity(outputs: list[list[int]], capacity: int) -> None:
    corpus = SharedCorpus(capacity, 1, 3)
    for output in outputs:
        corpus.add(output)
        assert corpus.num_tokens <= capacity
