"""A chat request as a prompt, sampling parameters and a parser of what comes back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specengine.core.errors import RequestError
from specengine.core.sampling import SamplingParams
from specengine.engine.chat_template import chat_text, template_of
from specengine.engine.tokens import encode_text
from specengine.server.bounds import check_rendered
from specengine.server.dialect import Dialect, dialect_of
from specengine.server.messages import Message, with_ids
from specengine.server.parsing.choice import ChoiceParser
from specengine.server.protocol import ChatRequest
from specengine.server.service import ServedEngine
from specengine.server.structured import FORMAT
from specengine.server.tools.constrain import Rules, answer_grammar
from specengine.server.tools.format import Tool

MakeParser = Callable[[], ChoiceParser]
EFFORT = "reasoning_effort"
# What templates call the switch of reasoning.
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class ChatPlan:
    """prompt: token ids. make_parser: None where all text is content."""

    prompt: list[int]
    sampling: SamplingParams
    make_parser: MakeParser | None


def plan_chat(engine: ServedEngine, body: ChatRequest, param: str = "messages") -> ChatPlan:
    """param: what the client calls the conversation. Raises RequestError where the request cannot
    be served, and ApiError where the conversation is too long."""
    sampling = body.to_sampling(engine.sampling_defaults)
    tokenizer = engine.tokenizer
    dialect = dialect_of(tokenizer, engine.config.server)
    tools = body.usable_tools()
    if tools:
        _check_tools(tokenizer, dialect)
    text = _prompt(tokenizer, dialect, body)
    check_rendered(text, engine.config.limits, engine.context_length, param)
    stage = dialect.stage(text)
    special = dialect.special(tokenizer, bool(tools))
    grammar = answer_grammar(
        _rules(body, sampling, tools), dialect.tools, dialect.reasoning, stage, special
    )
    sampling = replace(sampling, grammar=grammar, visible_special_ids=frozenset(special.values()))
    most_calls = 1 if body.parallel_tool_calls is False else None
    by_name = {tool.name: tool for tool in tools}
    prompt = encode_text(tokenizer, text, add_special_tokens=False, param="messages")
    return ChatPlan(prompt, sampling, dialect.parser(by_name, stage, most_calls))


def _check_tools(tokenizer: Any, dialect: Dialect) -> None:
    template = template_of(tokenizer)
    if template and not re.search(r"\btools\b", template):
        raise RequestError(
            "this model's chat template takes no tools; leave them out, or start the server with "
            "--chat-template FILE",
            "tools",
        )
    if dialect.tools is None:
        raise RequestError(
            "it is not known how this model writes tool calls; start the server with "
            "--tool-call-parser NAME",
            "tools",
        )


def template_turns(dialect: Dialect, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation as the model's chat template takes it."""
    turns = [message.for_template() for message in messages]
    if dialect.tools is None:
        return turns
    turns = with_ids(turns, dialect.tools.template_id)
    return [dialect.tools.template_turn(turn) for turn in turns]


def _prompt(tokenizer: Any, dialect: Dialect, body: ChatRequest) -> str:
    turns = template_turns(dialect, body.messages)
    variables = _variables(template_of(tokenizer), body)
    return chat_text(tokenizer, turns, tools=body.template_tools(), variables=variables)


def _variables(template: str, body: ChatRequest) -> dict[str, Any]:
    """The template's variables. reasoning_effort is one where the template has it; where it can
    only switch reasoning on and off, "none" is off."""
    effort, variables = body.reasoning_effort, dict[str, Any]()
    if effort is not None:
        switches = [name for name in _SWITCHES if re.search(rf"\b{name}\b", template)]
        if EFFORT in template:
            variables[EFFORT] = effort
        elif not switches:
            message = "this model's chat template has no reasoning effort; leave it out"
            raise RequestError(f"{EFFORT}: {message}", EFFORT)
        variables |= dict.fromkeys(switches, effort != "none")
    return variables | (body.chat_template_kwargs or {})


def _rules(body: ChatRequest, sampling: SamplingParams, tools: list[Tool]) -> Rules:
    """Calls are constrained where one must come, or a tool is strict."""
    form = sampling.grammar
    if body.must_call and form is not None:
        if form.param != FORMAT:
            message = f"{form.param} asks for a form, and tool_choice for a call; give one of them"
            raise RequestError(message, "tool_choice")
        form = None  # of the content, which an answer of calls has none of
    is_constrained = body.must_call or any(tool.is_strict for tool in tools)
    if tools and form is not None:
        is_constrained = True  # a call must be an alternative of the form
    return Rules(
        tools if is_constrained else (),
        body.must_call,
        body.parallel_tool_calls is not False and body.named_tool is None,
        form,
    )
