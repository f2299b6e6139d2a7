"""How training data are made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from specengine.core.options import option
from specengine.core.section import Section

# How far a run goes, and how fast; what it makes does not follow from these.
_BOUNDS = {"max_conversations", "max_tokens", "max_minutes", "concurrency", "report_seconds"}


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(Section):
    prompts: tuple[str, ...] = option((), "JSONL of `turns` or `messages`; may be given repeatedly")
    prompt_repeats: int = option(1, "conversations a prompt of the files")
    self_written: float | None = option(
        None,
        "share of conversations whose user turns the target writes; default: 1, 0 if --prompts",
    )
    openings: str | None = option(
        None, "JSONL of `category` and `opening` for user turns to begin with; default: built in"
    )
    openings_share: float = option(0.7, "share of self-written conversations that take an opening")
    second_turn_share: float = option(0.25, "share of self-written conversations that go on")
    user_temperatures: tuple[float, ...] = option(
        (0.7, 1.0), "of user turns that the target writes; each conversation draws one of these"
    )
    user_max_tokens: int = option(256, "longer self-written user turns are dropped")
    temperatures: tuple[float, ...] = option(
        (0.0, 0.0, 0.7, 1.0), "of answers; each conversation draws one of these"
    )
    answer_max_tokens: int = option(512, "an answer is cut here")
    max_len: int = option(2048, "tokens a document")
    min_prompt_words: int = option(3, "shorter self-written user turns are dropped")
    min_answer_tokens: int = option(4, "conversations with shorter answers are dropped")
    decontaminate: tuple[str, ...] = option(
        (), "JSONL of evaluation prompts that must not occur; may be given repeatedly"
    )
    decontaminate_ngram: int = option(8, "words in a row that count as an occurrence")
    seed: int = option(0, "everything follows from it")
    shard_index: int = option(0, "which part of the conversations this process makes")
    num_shards: int = option(1, "processes that share the conversations; join them with data merge")
    max_conversations: int | None = option(None, "conversations to start, dropped ones included")
    max_tokens: int | None = option(None, "answer tokens to make")
    max_minutes: float | None = option(None, "start no conversation after so many minutes")
    concurrency: int | None = option(
        None, "requests in the engine at a time; default --max-running-requests"
    )
    report_seconds: float = option(10.0, "between lines of progress, where there is no terminal")

    @property
    def written_share(self) -> float:
        """Share of conversations that are self-written."""
        if self.self_written is not None:
            return self.self_written
        return 0.0 if self.prompts else 1.0

    def recipe(self) -> dict[str, Any]:
        """What the documents follow from, beside the target."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _BOUNDS}

    def _check_ranges(self) -> None:
        for name in ("self_written", "openings_share", "second_turn_share"):
            value = getattr(self, name)
            self._require(value is None or 0.0 <= value <= 1.0, name, "must lie in [0, 1]")
        self._at_least(0, "seed", "shard_index")
        self._at_least(1, "prompt_repeats", "user_max_tokens", "answer_max_tokens")
        self._at_least(1, "min_prompt_words", "min_answer_tokens", "num_shards")
        self._at_least(1, "max_conversations", "max_tokens", "concurrency", "decontaminate_ngram")
        self._at_least(2, "max_len")
        for name in ("temperatures", "user_temperatures"):
            values = getattr(self, name)
            holds = len(values) > 0 and min(values) >= 0
            self._require(holds, name, "give at least one, each 0 or above")
        self._require(
            self.shard_index < self.num_shards, "shard_index", "must be below --num-shards"
        )
        for name in ("max_minutes", "report_seconds"):
            value = getattr(self, name)
            self._require(value is None or value > 0, name, "must be above 0")
        self._check_sources()

    def _check_sources(self) -> None:
        share = self.written_share
        self._require(
            bool(self.prompts) or share == 1.0, "self_written", "the rest needs --prompts"
        )
        bounds = (self.max_conversations, self.max_tokens, self.max_minutes)
        self._require(
            share == 0.0 or any(bound is not None for bound in bounds),
            "self_written",
            "would never end; give --max-tokens, --max-minutes or --max-conversations",
        )
