"""Which tokens a drafter of a smaller vocabulary could say: the most frequent ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specengine.core.errors import DataError
from specengine.draft.replay.requests import RecordedRequest
from specengine.draft.trace.format import Array


def ranks_from_file(path: Path, vocab_size: int) -> Array:
    """int64 [vocab_size], the place of each token in the file: an .npy array of token ids, the most
    frequent first. Tokens that it lacks come last. Raises DataError."""
    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as an .npy array: {error}") from error
    is_ids = ids.ndim == 1 and ids.dtype.kind in "iu" and len(np.unique(ids)) == len(ids)
    if not is_ids or (len(ids) and (ids.min() < 0 or ids.max() >= vocab_size)):
        raise DataError(
            f"{path} must hold different token ids below {vocab_size}, the most frequent first"
        )
    return _places(ids, vocab_size)


def ranks_from_others(requests: Sequence[RecordedRequest], vocab_size: int) -> list[Array]:
    """For each request, by frequency in the outputs of all others, so that no request chooses its
    own vocabulary."""
    counts = np.stack([_counts(one, vocab_size) for one in requests])
    total = counts.sum(0)
    return [_places(np.argsort(-(total - own), kind="stable"), vocab_size) for own in counts]


def _counts(request: RecordedRequest, vocab_size: int) -> Array:
    text = np.array(request.text, np.int64)
    return np.bincount(text[text >= 0], minlength=vocab_size)


def _places(ids: Array, vocab_size: int) -> Array:
    places = np.full(vocab_size, vocab_size, np.int64)
    places[ids] = np.arange(len(ids))
    return places
