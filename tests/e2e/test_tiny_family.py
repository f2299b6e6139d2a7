"""The tiny target with each drafter that ships for it: the same tokens in fewer rounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from specengine import LLM, SpecConfig
from tests.e2e.test_smollm2_eagle3 import answer as answer_of

CHAIN: dict[str, Any] = {"num_steps": 5, "adaptive": False}
TREE: dict[str, Any] = CHAIN | {"eagle_topk": 4, "num_draft_tokens": 16}


@dataclass(frozen=True)
class Expected:
    """floor: tokens a round, well under the 3.4, 4.1, 3.6, 4.3, 3.3 and 3.7 that were measured."""

    spec: SpecConfig
    floor: float


SETTINGS = {
    "EAGLE-3 chain": Expected(SpecConfig(algorithm="EAGLE3", **CHAIN), 2.6),
    "EAGLE-3 tree": Expected(SpecConfig(algorithm="EAGLE3", **TREE), 3.2),
    "MTP chain": Expected(SpecConfig(algorithm="MTP", **CHAIN), 2.7),
    "MTP tree": Expected(SpecConfig(algorithm="NEXTN", **TREE), 3.3),
    "standalone chain": Expected(SpecConfig(algorithm="STANDALONE", **CHAIN), 2.5),
    "standalone tree": Expected(SpecConfig(algorithm="STANDALONE", **TREE), 2.9),
}


answer = partial(answer_of, partial(LLM, "tiny", dtype="float32"), max_tokens=36)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return answer(None)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_tokens_in_fewer_rounds(plain: list[list[int]], name: str) -> None:
    expected = SETTINGS[name]
    tokens, accepted_length = answer(expected.spec)
    assert tokens == plain
    assert accepted_length > expected.floor
