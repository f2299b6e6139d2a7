"""Draft vocabularies: which tokens, and the tables that name them."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.errors import ConfigError
from specengine.draft.train.data.dataset import Document
from specengine.draft.train.vocabulary import DraftVocabulary, choose_vocabulary, count_answers


def document(tokens: list[int], answers: list[int]) -> Document:
    return Document(np.array(tokens, np.uint16), np.array(answers, np.uint8))


def test_answers_alone_are_counted() -> None:
    documents = [document([1, 2, 2, 3], [0, 0, 1, 1]), document([3, 3, 1], [1, 1, 0])]
    assert count_answers(documents, 5).tolist() == [0, 0, 1, 3, 0]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.data())
def test_most_frequent_tokens_are_chosen(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    vocabulary = DraftVocabulary.most_frequent(np.array(counts), size)
    ids = vocabulary.target_ids.tolist()
    assert ids == sorted(set(ids))
    assert len(ids) == size
    left = [count for token, count in enumerate(counts) if token not in ids]
    assert min(counts[token] for token in ids) >= max(left, default=0)
    assert vocabulary.is_whole == (size == len(counts))
    covered = sum(counts[token] for token in ids)
    assert vocabulary.coverage(np.array(counts)) == pytest.approx(covered / max(sum(counts), 1))


def test_tables_are_offsets_and_a_mask() -> None:
    vocabulary = DraftVocabulary(torch.tensor([1, 2, 5]), 7)
    assert vocabulary.d2t().tolist() == [1, 1, 3]
    assert vocabulary.t2d().tolist() == [False, True, True, False, False, True, False]


def test_coverage_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    documents = [document([4, 4, 4, 2], [1, 1, 1, 1])]
    with caplog.at_level(logging.INFO):
        vocabulary = choose_vocabulary(documents, 6, 1)
    assert vocabulary.target_ids.tolist() == [4]
    assert "1 of 6 tokens, 75.00% of the 4 answer tokens" in caplog.text


def test_more_tokens_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size=9: the target has 3 tokens"):
        DraftVocabulary.most_frequent(np.array([1, 1, 1]), 9)
