"""Conversations as prompts, through the model's own chat template.

Templates come with the model and are untrusted: transformers renders them in Jinja's immutable
sandbox.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specengine.core.errors import RequestError
from specengine.engine.tokens import encode_text


def has_chat_template(tokenizer: Any) -> bool:
    return bool(tokenizer.chat_template)


def template_of(tokenizer: Any) -> str:
    """The text of the template; of several, all of them. Empty where there is none."""
    template = tokenizer.chat_template or ""
    return "\n".join(template.values()) if isinstance(template, Mapping) else str(template)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of the conversation, up to where the assistant's next words begin.

    Raises RequestError where the model has no template, or its template refuses the messages.
    """
    text = chat_text(tokenizer, messages)
    return encode_text(tokenizer, text, add_special_tokens=False, param="messages")


def chat_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as text; without add_generation_prompt it ends after its last message.

    messages: a call in `tool_calls` has its arguments as an object; templates that need them as
    text get text. tools: as OpenAI writes them. variables: of the template. Raises RequestError.
    """
    if not has_chat_template(tokenizer):
        raise RequestError(
            "this model has no chat template; use /v1/completions, or start the engine with "
            "--chat-template FILE",
            "messages",
        )
    variables = dict(variables or {})
    _check_names(tokenizer, variables)
    turns = [dict(message) for message in messages]
    options = {"tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}

    def render(turns: list[dict[str, Any]]) -> str:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, **options, **variables)
        return text

    try:
        return render(turns)
    except Exception as error:  # a template may raise anything at all
        try:
            if any("tool_calls" in turn for turn in turns):
                return render([_with_text_arguments(turn) for turn in turns])
        except Exception:
            pass  # the first error is the one to tell
        raise RequestError(
            f"the model's chat template refuses these messages: {error}", "messages"
        ) from error


def _check_names(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Variables may not replace parameters of apply_chat_template: one is the template itself."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in variables:
        if name in taken:
            param = f"chat_template_kwargs.{name}"
            raise RequestError(f"{param} is no variable of a template; leave it out", param)


def _with_text_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in turn:
        return turn
    calls = [call | {"function": _text_function(call["function"])} for call in turn["tool_calls"]]
    return turn | {"tool_calls": calls}


def _text_function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return function | {"arguments": text}
