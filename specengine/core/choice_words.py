"""How requests want their tokens chosen, in the words of a ChoiceTable."""

from __future__ import annotations

from typing import Any

import numpy as np

from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.kernels.sample.types import MIN_P, NUM_COLUMNS, SEED, TEMPERATURE, TOP_K, TOP_P

# Beyond these, float32 logits make the distribution one-hot or uniform already.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-10, 1e10


def choice_words(reqs: list[Req], vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of a ChoiceTable, [B, NUM_COLUMNS]. Its positions count output tokens; a table that has
    them counted otherwise sets SHIFT."""
    words = np.zeros((len(reqs), NUM_COLUMNS), dtype=np.int64)
    params = [req.sampling for req in reqs]
    floats = words.view(np.float64)
    floats[:, TEMPERATURE] = [_temperature(p) for p in params]
    floats[:, TOP_P] = [1.0 if p.is_greedy else p.top_p for p in params]
    floats[:, MIN_P] = [0.0 if p.is_greedy else p.min_p for p in params]
    words[:, TOP_K] = [top_k_of(p, vocab_size) for p in params]
    words[:, SEED] = [(req.seed + 2**63) % 2**64 - 2**63 for req in reqs]
    return words


def _temperature(params: SamplingParams) -> float:
    if params.is_greedy:
        return 0.0
    return min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)


def top_k_of(params: SamplingParams, vocab_size: int) -> int:
    cuts = params.top_k > 0 and not params.is_greedy
    return min(params.top_k, vocab_size) if cuts else vocab_size
