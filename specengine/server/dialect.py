"""How the served model writes reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specengine.core.config import ServerConfig
from specengine.engine.chat_template import template_of
from specengine.engine.tokens import special_ids
from specengine.server.parsing.answer import ParsedAnswer, new_call_id
from specengine.server.parsing.choice import ChoiceParser
from specengine.server.parsing.reader import Reader, Steps
from specengine.server.reasoning.registry import REASONING, detect_reasoning
from specengine.server.reasoning.tags import ReasoningTags, Stage
from specengine.server.tools.format import AnswerFormat, ToolFormat, Tools
from specengine.server.tools.registry import FORMATS, detect_format


@dataclass(frozen=True)
class Dialect:
    """tools: the format of calls; None where it is not known. reasoning: the tags around reasoning;
    None where the model has none, or `tools` reads it."""

    tools: ToolFormat | None
    reasoning: ReasoningTags | None

    @property
    def answer_format(self) -> AnswerFormat | None:
        """`tools`, where it is the format of the whole answer."""
        return self.tools if isinstance(self.tools, AnswerFormat) else None

    def special(self, tokenizer: Any, has_tools: bool) -> dict[str, int]:
        """The markers that are special tokens of the model, of what is read."""
        reads_format = has_tools or self.answer_format is not None
        markers = (*(self.tools.markers if self.tools is not None and reads_format else ()),)
        markers += () if self.reasoning is None else self.reasoning.markers
        return special_ids(tokenizer, markers)

    def stage(self, prompt: str) -> Stage:
        return Stage.BEFORE if self.reasoning is None else self.reasoning.stage(prompt)

    def parser(
        self, tools: Tools, stage: Stage, most_calls: int | None
    ) -> Callable[[], ChoiceParser] | None:
        """Makes the parser of a choice; None where all text is content. tools: those that may be
        called."""
        tool_format = self.tools if tools else self.answer_format
        reasoning = self.reasoning
        if tool_format is None and reasoning is None:
            return None
        new_id = new_call_id if tool_format is None else tool_format.new_id

        def read(reader: Reader, answer: ParsedAnswer) -> Steps[None]:
            if reasoning is not None:
                yield from reasoning.read(reader, answer, stage)
            if tool_format is not None:
                yield from tool_format.read(reader, answer, tools)
            yield from reader.rest(answer.add_content)

        return lambda: ChoiceParser(read, ParsedAnswer(most_calls, new_id))


def dialect_of(tokenizer: Any, config: ServerConfig) -> Dialect:
    """As the configuration says; "auto" goes by the model's chat template."""
    return _dialect(template_of(tokenizer), config.tool_call_parser, config.reasoning_parser)


@lru_cache(maxsize=8)
def _dialect(template: str, tools: str, reasoning: str) -> Dialect:
    for name in (tools, reasoning):
        named = FORMATS.get(name)
        if isinstance(named, AnswerFormat):
            return Dialect(named, None)
    tool_format = detect_format(template) if tools == "auto" else FORMATS.get(tools)
    if reasoning != "auto":
        tags = REASONING.get(reasoning)
    else:
        tags = None if isinstance(tool_format, AnswerFormat) else detect_reasoning(template)
    return Dialect(tool_format, tags)
