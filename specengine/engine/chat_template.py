"""Conversations as prompts, through the model's own chat template.

Templates come with the model and are untrusted: transformers renders them in Jinja's immutable
sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specengine.core.errors import RequestError
from specengine.engine.tokens import encode_text


def has_chat_template(tokenizer: Any) -> bool:
    return bool(tokenizer.chat_template)


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of the conversation, up to where the assistant's next words begin.

    Raises RequestError where the model has no template, or its template refuses the messages.
    """
    text = chat_text(tokenizer, messages)
    return encode_text(tokenizer, text, add_special_tokens=False, param="messages")


def chat_text(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
) -> str:
    """The conversation as text; without add_generation_prompt it ends after its last message."""
    if not has_chat_template(tokenizer):
        raise RequestError(
            "this model has no chat template; use /v1/completions, or start the engine with "
            "--chat-template FILE",
            "messages",
        )
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except Exception as error:  # a template may raise anything at all
        raise RequestError(
            f"the model's chat template refuses these messages: {error}", "messages"
        ) from error
    return text
