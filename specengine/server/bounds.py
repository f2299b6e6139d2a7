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

    def check(self, body: Body, limits: LimitConfig, place: str = "") -> None:
        size, most = self.size(body), getattr(limits, self.limit)
        if size > most:
            option, param = limits.options()[self.limit], place + self.param
            what = option.help.removesuffix(", as JSON without spaces")
            message = f"{param}: {size} {what}; at most {most} are taken here ({option.flag})"
            raise ApiError(400, message, param, "limit_exceeded")


def check_bounds(body: Any, limits: LimitConfig) -> None:
    """ApiError (400) that names the first field which is larger than its limit."""
    if not isinstance(body, dict):
        return
    for bound in BOUNDS:
        if bound.param in body or bound is CHOICES:  # prompts without n are choices too
            bound.check(body, limits)
    for place, nested in _nested(body):
        for bound in NESTED_BOUNDS:
            bound.check(nested, limits, f"{place}.")
        choices = {"prompt": [""] * _num_prompts(body), "n": nested.get("n")}
        CHOICES.check(choices, limits, f"{place}.")


def _nested(body: Body) -> Iterator[tuple[str, Body]]:
    """`sampling_params`: one object, or a list of them."""
    given = body.get("sampling_params")
    if isinstance(given, dict):
        yield "sampling_params", given
    for number, one in enumerate(given if isinstance(given, list) else ()):
        if isinstance(one, dict):
            yield f"sampling_params[{number}]", one


def check_text(body: Any, limits: LimitConfig, context_length: int) -> None:
    """ApiError (400) for a prompt of more bytes than the context can be expected to hold, or of as
    many token ids as it has places."""
    for param, count in _id_counts(body):
        check_fits(count, context_length, param)
    for param, size in _text_sizes(body):
        _check_size(param, size, limits, context_length)


def check_rendered(
    text: str, limits: LimitConfig, context_length: int, param: str = "messages"
) -> None:
    """ApiError (400) for a conversation of more bytes than `check_text` takes. Its template may
    write what no text of a message is: arguments of calls, names, tools, variables."""
    _check_size(param, _num_bytes(text), limits, context_length, " as the template has them")


def _check_size(
    param: str, size: int, limits: LimitConfig, context_length: int, form: str = ""
) -> None:
    most = limits.max_bytes_per_token * context_length
    if size > most:
        message = (
            f"{param} has {size} bytes of text{form}; the context of {context_length} tokens takes "
            f"{most} at most ({limits.options()['max_bytes_per_token'].flag}); shorten it"
        )
        raise ApiError(400, message, param, "context_length_exceeded")


def check_fits(num_tokens: int, context_length: int, param: str) -> None:
    """ApiError (400) for a prompt that leaves no room. (max_tokens beyond the context is cut.)"""
    if num_tokens >= context_length:
        message = (
            f"the prompt has {num_tokens} tokens, and the context length of this model is "
            f"{context_length}: no token can follow; shorten the prompt"
        )
        raise ApiError(400, message, param, "context_length_exceeded")


def _id_counts(body: Any) -> Iterator[tuple[str, int]]:
    """Token ids of each prompt."""
    for param in PROMPTS if isinstance(body, dict) else ():
        prompt = body.get(param)
        for one in prompt if isinstance(prompt, list) and _is_many(prompt) else [prompt]:
            if isinstance(one, list) and one and isinstance(one[0], int):
                yield param, len(one)


def _text_sizes(body: Any) -> Iterator[tuple[str, int]]:
    """UTF-8 bytes of each prompt, and of all messages together."""
    if not isinstance(body, dict):
        return
    for param in PROMPTS:
        prompt = body.get(param)
        for one in prompt if isinstance(prompt, list) and _is_many(prompt) else [prompt]:
            if isinstance(one, str):
                yield param, _num_bytes(one)
    for param in CONVERSATIONS:
        turns = body.get(param)
        if isinstance(turns, list):
            yield param, sum(_num_bytes(text) for one in turns for text in _texts(one))


def _texts(turn: Any) -> Iterator[str]:
    """The texts of a message, or of an item that is no message."""
    for name in ("content", "output", "summary") if isinstance(turn, dict) else ():
        content = turn.get(name)
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
    return max(size(body) for size in map(_num_of, LISTED_PROMPTS))


def _num_of(param: str) -> Callable[[Body], int]:
    """Prompts in a field."""
    return lambda body: len(body[param]) if _is_many(body.get(param)) else 1


def _num_params(body: Body) -> int:
    given = body.get("sampling_params")
    return len(given) if isinstance(given, list) else 1


def _is_many(prompt: Any) -> bool:
    """A list of prompts, not of token ids or of items of a conversation."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int | dict)


def _num_choices(param: str) -> Callable[[Body], int]:
    return lambda body: _num_prompts(body) * _as_int(body.get(param))


def _as_int(value: Any) -> int:
    return value if isinstance(value, int) else 1


def _num_items(body: Body) -> int:
    turns = body.get("input")
    return len(turns) if isinstance(turns, list) and not _is_many(turns) else 1


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


def _format_bytes(body: Body) -> int:
    """`text` of /v1/responses; elsewhere it is a prompt."""
    return _json_bytes("text")(body) if isinstance(body.get("text"), dict) else 0


# Fields that hold prompts, one or a list of them, and those that hold the turns of a conversation.
LISTED_PROMPTS = ("prompt", "text", "input_ids", "input")
PROMPTS = (*LISTED_PROMPTS, "instructions")
CONVERSATIONS = ("messages", "input")
_SAMPLING = (
    Bound("max_stop_strings", "stop", _count("stop")),
    Bound("max_stop_bytes", "stop", _longest_stop),
    Bound("max_stop_token_ids", "stop_token_ids", _count("stop_token_ids")),
    Bound("max_logit_bias", "logit_bias", _count("logit_bias")),
)
_FORMS = ("json_schema", "regex", "ebnf")
# In `sampling_params`, where these fields are in an object of their own.
NESTED_BOUNDS = (
    *_SAMPLING,
    *(Bound("max_grammar_bytes", form, _json_bytes(form)) for form in _FORMS),
)
CHOICES = Bound("max_choices", "n", _num_choices("n"))
BOUNDS = (
    *_SAMPLING,
    Bound("max_messages", "messages", _count("messages")),
    Bound("max_messages", "input", _num_items),
    *(Bound("max_prompts", param, _num_of(param)) for param in LISTED_PROMPTS),
    Bound("max_prompts", "sampling_params", _num_params),
    CHOICES,
    Bound("max_choices", "best_of", _num_choices("best_of")),
    Bound("max_grammar_bytes", "response_format", _json_bytes("response_format")),
    Bound("max_grammar_bytes", "structured_outputs", _json_bytes("structured_outputs")),
    Bound("max_grammar_bytes", "text", _format_bytes),
    Bound("max_tools_bytes", "tools", _json_bytes("tools")),
    Bound("max_metadata_bytes", "metadata", _json_bytes("metadata")),
)
