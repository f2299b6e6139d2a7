"""What a model's drafts beside a text's leave in rounds on the device is as likely as the target
says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from specengine import LLM
from specengine.engine.proof.runs import MAX_MUTANT_P, MIN_P
from specengine.engine.row_draws import RowDraws
from tests.engine.hybrid_tree_world import trees
from tests.engine.hybrid_world import Sources, fly, hybrid, make
from tests.engine.test_graph_weighed import ON_CPU
from tests.engine.test_weighed_tree_chances import (
    CHOICES,
    HOT,
    LENGTH,
    PROMPT,
    REQUESTS,
    joint,
    p_value,
)
from tests.engine.weighed_hybrid_world import RULES, Folders


def flying(
    folders: Folders, rule: str, branches: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[LLM, Sources]:
    folder, spec = folders["EAGLE3"]
    given = RULES[rule]
    spec = trees(spec, "both", **given) if branches else hybrid(spec, 4, **given)
    llm = make(folder, spec, max_running_requests=64, max_total_tokens=16384)
    return llm, fly(llm, monkeypatch, most=64)[1]


def prompt_of(plain: LLM) -> list[int]:
    """Of which text drafts what may be said next."""
    params = [replace(HOT, seed=1000 + seed) for seed in range(4)]
    said = plain.generate([PROMPT] * 4, params)
    start = plain.tokenizer.encode(PROMPT)
    return [*(token for one in said for token in [*start, *one.token_ids]), *start]


@ON_CPU
@pytest.mark.parametrize(
    ("rule", "branches"),
    [
        ("block", False),
        pytest.param("rejection", False, marks=pytest.mark.slow),
        pytest.param("of the best", False, marks=pytest.mark.slow),
        pytest.param("sibling", True, marks=pytest.mark.slow),
        pytest.param("target_only", True, marks=pytest.mark.slow),
    ],
)
def test_texts_are_as_likely_as_the_target_says(
    rule: str, branches: bool, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make(folders["EAGLE3"][0], None)
    prompt = prompt_of(plain)
    expected = joint(plain, prompt)
    assert len(expected) == CHOICES**LENGTH
    llm, sources = flying(folders, rule, branches, monkeypatch)
    assert p_value(llm, expected, prompt) > MIN_P
    assert all(form.choosing.weighs for form in sources.forms)
    assert sources.rounds["both"] > 10
    assert sources.accepted["text"] > REQUESTS / 20


@ON_CPU
def test_text_that_passes_for_the_models_is_caught(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def override(self: RowDraws, tokens_BK: Tensor, are_B: Tensor) -> None:
        """Weights are those of drafts that are not there."""

    plain = make(folders["EAGLE3"][0], None)
    prompt = prompt_of(plain)
    expected = joint(plain, prompt)
    monkeypatch.setattr(RowDraws, "override", override)
    llm, _ = flying(folders, "block", False, monkeypatch)
    assert p_value(llm, expected, prompt) < MAX_MUTANT_P
