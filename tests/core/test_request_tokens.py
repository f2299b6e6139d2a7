"""Tokens of a request as an array."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from specengine.core.request import Req
from specengine.core.sampling import SamplingParams


def test_span_of_tokens_is_that_of_the_list_and_follows_the_output() -> None:
    req = Req("a", [5, 6, 7], SamplingParams())
    for output in ([], [8], [8, 9]):
        req.output_ids[:] = output
        for start, end in product(range(6), range(8)):
            if start <= min(end, req.seq_len):
                found = req.tokens(start, end)
                assert found.dtype == np.int64
                assert found.tolist() == req.token_ids[start:end]


def test_span_cannot_be_written_to() -> None:
    req = Req("a", [5, 6, 7], SamplingParams())
    with pytest.raises(ValueError, match="read-only"):
        req.tokens(0, 2)[0] = 1
