"""Prompts whose text goes on now like this and now like that, so that lookup drafts trees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specengine import SamplingParams
from tests.support.rounds import make

BETWEEN_TWO = SamplingParams(temperature=9.0, top_k=2, max_tokens=260, ignore_eos=True)


class TornPrompts(dict[Path, list[list[int]]]):
    """By target, each made when first asked for."""

    def __missing__(self, folder: Path) -> list[list[int]]:
        self[folder] = torn_prompts(folder)
        return self[folder]


def torn_prompts(folder: Path) -> list[list[int]]:
    """Text of the target, between two tokens everywhere, and prompts for which nothing is drafted
    at first."""
    llm, params = make(folder, None), [replace(BETWEEN_TWO, seed=seed) for seed in (1, 2)]
    emitted = [one.token_ids for one in llm.generate(["a", "b"], params)]
    fresh = [llm.tokenizer.encode(text) for text in ("x", "The quick brown fox")]
    return [emitted[0], fresh[0], emitted[1], fresh[1]]
