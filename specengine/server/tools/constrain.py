"""The grammar of an answer that may, or must, call tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec
from specengine.server.reasoning.tags import ReasoningTags, Stage
from specengine.server.tools.format import AnswerFormat, Tool, ToolFormat
from specengine.server.tools.lark import Lark


@dataclass(frozen=True)
class Rules:
    """What an answer must follow. tools: those whose calls are constrained; none where none may be
    called, or nothing is to hold for them. body: what it follows where it calls none, if anything.
    """

    tools: Sequence[Tool] = ()
    must_call: bool = False
    is_parallel: bool = True
    body: GrammarSpec | None = None


def answer_grammar(
    rules: Rules,
    tool_format: ToolFormat | None,
    reasoning: ReasoningTags | None,
    stage: Stage,
    special: Mapping[str, int],
) -> GrammarSpec | None:
    """The grammar of the whole answer, reasoning and framing included; None where all may follow.
    special: the markers that are special tokens. Raises RequestError."""
    if not rules.tools and rules.body is None:
        return None
    lark = Lark(special)
    body = None if rules.body is None else "@body"
    is_framed = reasoning is not None or isinstance(tool_format, AnswerFormat)
    if not rules.tools and not is_framed:
        return rules.body
    if isinstance(tool_format, AnswerFormat):
        calls = _calls(lark, tool_format, rules) if rules.tools else None
        start = tool_format.frame(
            lark, calls, None if rules.must_call else body or f"{lark.text()}?"
        )
    else:
        start = _reasoning(lark, reasoning, stage)
        start += _answer(lark, tool_format, rules, reasoning, body)
    if rules.body is None:
        return GrammarSpec.ebnf(lark.write(start), "tools")
    spec = rules.body
    return GrammarSpec(spec.kind, spec.text, spec.param, lark.write(start))


def _reasoning(lark: Lark, tags: ReasoningTags | None, stage: Stage) -> str:
    if tags is None or stage is Stage.AFTER:
        return ""
    if stage is Stage.INSIDE:
        return f"{lark.upto(tags.end)} {lark.space()} "
    return f"({lark.upto(tags.end, lead=tags.start)} {lark.space()})? "


def _answer(
    lark: Lark,
    tool_format: ToolFormat | None,
    rules: Rules,
    reasoning: ReasoningTags | None,
    body: str | None,
) -> str:
    """What follows the reasoning."""
    if tool_format is None or not rules.tools:
        assert body is not None
        return body
    layout = tool_format.layout(lark)
    if rules.must_call or body is not None:
        calls = _calls(lark, tool_format, rules)
        return calls if rules.must_call else f"({calls} | {body})"
    if layout.trigger:
        but = "" if reasoning is None else reasoning.start
        calls = _calls(lark, tool_format, rules, lark.upto(layout.trigger, but=but))
        return f"({lark.text(but)}? | {calls})"
    # The first character tells.
    text = lark.rule(r"/[^\s\[{](?s:.*)/", "TEXT")
    return f"({text}? | {_calls(lark, tool_format, rules)})"


def _calls(lark: Lark, tool_format: ToolFormat, rules: Rules, lead: str | None = None) -> str:
    """One call, or several. lead: the expression in place of the trigger of the first."""
    layout = tool_format.layout(lark)
    opening = layout.open + layout.before
    if lead is not None:
        opening = opening.removeprefix(layout.trigger)
    alternatives = [
        f"{lark.literal(tool.name + layout.middle)} {_arguments(lark, tool_format, tool)} "
        f"{lark.literal(layout.after)}"
        for tool in rules.tools
    ]
    call = lark.rule(" | ".join(alternatives), "call")
    several = f"({lark.literal(layout.separator + layout.before)} {call})*"
    is_one = not rules.is_parallel or not tool_format.has_parallel_calls
    return (
        f"{lead or ''} {lark.literal(opening)} {call} {'' if is_one else several} "
        f"{lark.literal(layout.close)}"
    )


def _arguments(lark: Lark, tool_format: ToolFormat, tool: Tool) -> str:
    try:
        return tool_format.arguments(lark, tool)
    except (AttributeError, RecursionError, TypeError, ValueError) as error:  # clients write it
        message = f"tools: the parameters of {tool.name} are no JSON schema that can be followed"
        raise RequestError(f"{message}; correct them", "tools") from error
