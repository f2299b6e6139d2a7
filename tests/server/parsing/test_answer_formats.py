"""A format of whole answers is known by its class, whichever it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specengine.core.grammar import GrammarSpec
from specengine.server.dialect import dialect_of
from specengine.server.parsing.answer import ParsedAnswer
from specengine.server.parsing.reader import Reader, Steps
from specengine.server.reasoning.tags import Stage
from specengine.server.tools.constrain import Rules, answer_grammar
from specengine.server.tools.format import AnswerFormat, Layout, Tool, Tools
from specengine.server.tools.lark import Lark
from specengine.server.tools.registry import FORMATS


class Shouts(AnswerFormat):
    """Answers begin with "!"; a call is "!name " and its arguments."""

    has_parallel_calls = False

    def read(self, reader: Reader, answer: ParsedAnswer, tools: Tools) -> Steps[None]:
        yield from reader.upto(["!"], answer.add_reasoning)
        yield from reader.rest(answer.add_content)

    def layout(self, lark: Lark) -> Layout:
        return Layout(before="", middle=" ", separator="&")

    def frame(self, lark: Lark, calls: str | None, body: str | None) -> str:
        return f"{lark.literal('!')} ({calls or body})"


@pytest.fixture
def dialect(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(FORMATS, "shouts", Shouts())
    config: Any = SimpleNamespace(tool_call_parser="auto", reasoning_parser="shouts")
    return dialect_of(SimpleNamespace(chat_template="<tool_call></think>"), config)


def test_answer_format_reads_answers_without_tools_and_without_tags(dialect: Any) -> None:
    assert dialect.reasoning is None
    parser = dialect.parser({}, Stage.BEFORE, None)()
    parser.feed("hm!text", ended=True)
    assert (parser.answer.reasoning, parser.answer.content) == ("hm", "text")


def test_answer_format_frames_the_grammar_of_one_call_or_a_form(dialect: Any) -> None:
    rules = Rules([Tool("f")], must_call=True)
    calls = answer_grammar(rules, dialect.tools, None, Stage.BEFORE, {})
    assert calls is not None
    assert '"!"' in calls.text
    assert '"&"' not in calls.text  # no second call
    form = answer_grammar(
        Rules(body=GrammarSpec.json_object()), dialect.tools, None, Stage.BEFORE, {}
    )
    assert form is not None
    assert '"!"' in str(form)


def test_gpt_oss_template_gets_reasoning_beside_calls_alone_as_thinking() -> None:
    template_turn = FORMATS["gpt_oss"].template_turn
    turn = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert template_turn(turn) == {**turn, "thinking": "hm"}
    for other in ({**turn, "content": "text"}, {"role": "user", "content": ""}):
        assert template_turn(other) == other
    assert FORMATS["hermes"].template_turn(turn) == turn
