"""How large the fields of a request may be, looked at before they are validated or tokenized."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from specengine.core.grammar import is_nested_deeply
from specengine.core.limits import LimitConfig
from specengine.server.errors import ApiError

Body = dict[str, Any]


@dataclass(frozen=True)
class Bound:
    """`size` of a body may be at most the limit of that name. It takes any JSON: fields may yet be
    of the wrong type, which is then refused elsewhere."""

    limit: str
    param: str
    size: Callable[[Body], int]


def check_bounds(body: Any, limits: LimitConfig) -> None:
    """ApiError (400) that names the first field which is larger than its limit."""
    if not isinstance(body, dict):
        return
    for bound in BOUNDS:
        size, most = bound.size(body), getattr(limits, bound.limit)
        if size > most:
            option = limits.options()[bound.limit]
            what = option.help.removesuffix(", as JSON without spaces")
            message = f"{size} {what}; at most {most} are taken here ({option.flag})"
            raise ApiError(400, f"{bound.param}: {message}", bound.param, "limit_exceeded")


def check_text(body: Any, limits: LimitConfig, context_length: int) -> None:
    """ApiError (400) for a prompt of more bytes than the context can be expected to hold."""
    most = limits.max_bytes_per_token * context_length
    for param, size in _text_sizes(body):
        if size > most:
            message = (
                f"{param} has {size} bytes of text; the context of {context_length} tokens takes "
                f"{most} at most ({limits.options()['max_bytes_per_token'].flag}); shorten it"
            )
            raise ApiError(400, message, param, "context_length_exceeded")


def _text_sizes(body: Any) -> Iterator[tuple[str, int]]:
    """UTF-8 bytes of each prompt, and of all messages together."""
    if not isinstance(body, dict):
        return
    prompt, messages = body.get("prompt"), body.get("messages")
    for one in prompt if isinstance(prompt, list) and _is_many(prompt) else [prompt]:
        if isinstance(one, str):
            yield "prompt", _num_bytes(one)
    if isinstance(messages, list):
        yield "messages", sum(_num_bytes(text) for one in messages for text in _texts(one))


def _texts(message: Any) -> Iterator[str]:
    content = message.get("content") if isinstance(message, dict) else None
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _count(param: str) -> Callable[[Body], int]:
    def size(body: Body) -> int:
        value = body.get(param)
        return len(value) if isinstance(value, list | dict) else 1

    return size


def _num_prompts(body: Body) -> int:
    return len(body["prompt"]) if _is_many(body.get("prompt")) else 1


def _is_many(prompt: Any) -> bool:
    """A list of prompts, not of token ids."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


def _num_choices(body: Body) -> int:
    n = body.get("n")
    return _num_prompts(body) * (n if isinstance(n, int) else 1)


def _longest_stop(body: Body) -> int:
    stop = body.get("stop")
    texts = stop if isinstance(stop, list) else [stop]
    return max((_num_bytes(text) for text in texts if isinstance(text, str)), default=0)


def _json_bytes(param: str) -> Callable[[Body], int]:
    def size(body: Body) -> int:
        value = body.get(param)
        if value is None:
            return 0
        try:
            return len(orjson.dumps(value))
        except TypeError:  # numbers beyond 64 bits, half a surrogate pair, or deep nesting
            pass
        if is_nested_deeply(value):
            raise ApiError(400, f"{param} is nested too deeply", param, "limit_exceeded")
        return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False))

    return size


BOUNDS = (
    Bound("max_messages", "messages", _count("messages")),
    Bound("max_prompts", "prompt", _num_prompts),
    Bound("max_choices", "n", _num_choices),
    Bound("max_stop_strings", "stop", _count("stop")),
    Bound("max_stop_bytes", "stop", _longest_stop),
    Bound("max_stop_token_ids", "stop_token_ids", _count("stop_token_ids")),
    Bound("max_logit_bias", "logit_bias", _count("logit_bias")),
    Bound("max_grammar_bytes", "response_format", _json_bytes("response_format")),
    Bound("max_grammar_bytes", "structured_outputs", _json_bytes("structured_outputs")),
    Bound("max_tools_bytes", "tools", _json_bytes("tools")),
    Bound("max_metadata_bytes", "metadata", _json_bytes("metadata")),
)
