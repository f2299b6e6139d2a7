"""The draft's own vocabulary: the tokens that the target says most often."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specengine.core.errors import ConfigError
from specengine.draft.train.data.dataset import Document

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftVocabulary:
    """Draft token d is the target's token target_ids[d]."""

    target_ids: Tensor  # int64 [Vd], ascending
    target_vocab_size: int

    @property
    def size(self) -> int:
        return len(self.target_ids)

    @property
    def is_whole(self) -> bool:
        return self.size == self.target_vocab_size

    def d2t(self) -> Tensor:
        """int64 [Vd], what to add to a draft token to have the target's."""
        return self.target_ids - torch.arange(self.size)

    def t2d(self) -> Tensor:
        """bool [V], which of the target's tokens the draft has."""
        mask = torch.zeros(self.target_vocab_size, dtype=torch.bool)
        return mask.index_fill(0, self.target_ids, True)

    def coverage(self, counts: NDArray[np.int64]) -> float:
        """The share of counted tokens that the draft can say."""
        return float(counts[self.target_ids.numpy()].sum() / max(int(counts.sum()), 1))

    @classmethod
    def most_frequent(cls, counts: NDArray[np.int64], size: int | None) -> DraftVocabulary:
        """counts [V], by token; equal counts go by id. size: None is the whole vocabulary. Raises
        ConfigError for more tokens than the target has."""
        vocab_size = len(counts)
        if size is None:
            return cls(torch.arange(vocab_size), vocab_size)
        if not 1 <= size <= vocab_size:
            raise ConfigError(
                f"task.draft_vocab_size={size}: the target has {vocab_size} tokens; ask for at "
                "most as many"
            )
        chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
        return cls(torch.from_numpy(chosen.astype(np.int64)), vocab_size)


def count_answers(documents: Iterable[Document], vocab_size: int) -> NDArray[np.int64]:
    """int64 [V], how often the target said each token."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        answers = document.tokens[document.loss.astype(bool)].astype(np.int64)
        counts += np.bincount(answers, minlength=vocab_size)
    return counts


def choose_vocabulary(
    documents: Iterable[Document], vocab_size: int, size: int | None
) -> DraftVocabulary:
    """The `size` tokens said most often, and a line in the log on what they cover."""
    counts = count_answers(documents, vocab_size)
    vocabulary = DraftVocabulary.most_frequent(counts, size)
    logger.info(
        "draft vocabulary: %d of %d tokens, %.2f%% of the %d answer tokens in the data",
        vocabulary.size,
        vocab_size,
        100 * vocabulary.coverage(counts),
        int(counts.sum()),
    )
    return vocabulary
