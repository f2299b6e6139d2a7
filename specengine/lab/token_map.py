"""Makes a token map: the tokens of a target that a corpus has most often."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specengine.core.config import ModelConfig
from specengine.core.errors import ConfigError
from specengine.draft.token_map import write_token_map
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.vocabulary import DraftVocabulary, count_answers
from specengine.runner.loader.source import resolve_model
from specengine.runner.loader.tokenizer import load_tokenizer


@dataclass(frozen=True)
class MadeMap:
    """coverage: share of the corpus's tokens that are in the map."""

    num_tokens: int
    vocab_size: int
    coverage: float


def make_token_map(corpus: Path, out: Path, size: int, model: str | None) -> MadeMap:
    """corpus: a data set, whose answers count, or a text file, which `model` cuts into tokens. Ends
    of text are always in the map. Raises ConfigError, DataError or ModelLoadError."""
    ends: frozenset[int] = frozenset()
    if corpus.is_dir():
        dataset = TokenDataset(corpus)
        counts = count_answers(dataset.documents, dataset.manifest.target.vocab_size)
    elif model is None:
        raise ConfigError(f"{corpus} is text; name the target whose tokens count with --model")
    else:
        source = resolve_model(ModelConfig(model=model))
        ends = source.eos_token_ids
        counts = _count_text(corpus, load_tokenizer(source), int(source.hf_config.vocab_size))
    rank = counts.copy()
    rank[sorted(ends)] = counts.max(initial=0) + 1
    chosen = DraftVocabulary.most_frequent(rank, size)
    write_token_map(chosen.target_ids, out)
    return MadeMap(chosen.size, len(counts), chosen.coverage(counts))


def _count_text(path: Path, tokenizer: Any, vocab_size: int) -> NDArray[np.int64]:
    """int64 [V], line by line."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                ids = tokenizer(line, add_special_tokens=False).input_ids
                counts += np.bincount(np.array(ids, dtype=np.int64), minlength=vocab_size)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error
    return counts
