"""Reasoning between two tags, before the answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.parsing.reader import Reader, Steps


class Stage(Enum):
    """Where the prompt leaves the model."""

    BEFORE = "before"  # it may reason
    INSIDE = "inside"  # it reasons already: the prompt ends with the opening tag
    AFTER = "after"  # the prompt ends with the closing tag


@dataclass(frozen=True)
class ReasoningTags:
    start: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end

    def stage(self, prompt: str) -> Stage:
        prompt = prompt.rstrip()
        if prompt.endswith(self.start):
            return Stage.INSIDE
        return Stage.AFTER if prompt.endswith(self.end) else Stage.BEFORE

    def read(self, reader: Reader, answer: ParsedAnswer, stage: Stage) -> Steps[None]:
        """The reasoning, if any; the answer follows. Text that never closes it is all reasoning."""
        reader.mark()
        yield from reader.skip_space()
        is_tagged = yield from reader.take(self.start)
        if not is_tagged and stage is not Stage.INSIDE:
            reader.back()
            return
        reader.keep()
        yield from reader.upto([self.end], answer.add_reasoning)
        answer.cut()
