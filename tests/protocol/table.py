"""Every field of every endpoint that generates: what it does, and a body that uses it.

docs/reference/protocol.md is drawn from this list (`python -m tests.protocol.draw`), and
test_speculation.py sends each body to a server that drafts and to one that does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from specengine.server.native.fields import NativeRequest
from specengine.server.native.sampling import NativeSampling
from specengine.server.protocol import ChatRequest, CompletionRequest
from specengine.server.responses.fields import ResponsesRequest

Json = dict[str, Any]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, GENERATE = "/v1/responses", "/generate"
MODELS: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    TEXT: CompletionRequest,
    RESPONSES: ResponsesRequest,
    GENERATE: NativeRequest,
}
QUESTION = "Give me five tips for better sleep."
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA_TEXT = '{"type": "array", "items": {"type": "string"}, "minItems": 3}'
FUNCTION: Json = {"name": "weather", "parameters": SCHEMA, "strict": True}
CALL: Json = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
TWO = [PROMPT, "Once upon a time"]
FLAT_CALL: Json = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
RANDOM: Json = {"temperature": 0.8, "seed": 7}
# A field of /generate by the name that the others have for it.
NATIVE = {
    "include_stop_str_in_output": "no_stop_trim",
    "logprobs": "return_logprob",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "return_token_ids": "return_prompt_token_ids",
    "seed": "sampling_seed",
    "top_logprobs": "top_logprobs_num",
}
BASE: dict[str, Json] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24},
    TEXT: {"model": "tiny", "prompt": PROMPT, "max_tokens": 24},
    RESPONSES: {"model": "tiny", "input": QUESTION, "max_output_tokens": 24},
    GENERATE: {"model": "tiny", "text": PROMPT, "max_tokens": 24},
}


@dataclass(frozen=True)
class Row:
    """One field, by OpenAI's name. uses: fields that show it at work, at every endpoint that has
    it; at: at one endpoint, instead. with_speculation: what becomes of the answer, where there is
    more to say."""

    name: str
    what: str
    uses: Json = field(default_factory=dict)
    at: Mapping[str, Json] = field(default_factory=dict)
    with_speculation: str = "the same answer"


ROWS = (
    Row("model", "a served name"),
    Row("messages", "a conversation; parts of text alone"),
    Row("prompt", "a text, token ids, or a list of either", {"prompt": [PROMPT, [5, 6, 7, 8]]}),
    Row("input", "a text, or messages, calls, their outputs and reasoning"),
    Row("instructions", "a message of the system before the input", {"instructions": "Be brief."}),
    Row(
        "text",
        "/generate: a prompt, or a list; /v1/responses: the form of the answer",
        at={
            GENERATE: {"text": TWO},
            RESPONSES: {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 40},
        },
    ),
    Row(
        "input_ids", "token ids, or a list of lists", {"text": None, "input_ids": [[5, 6, 7], [9]]}
    ),
    Row(
        "sampling_params",
        "the fields below that stand in it; of a list of prompts, one or a list",
        at={
            GENERATE: {
                "text": TWO,
                "sampling_params": [{"temperature": 0, "max_new_tokens": k} for k in (24, 9)],
            }
        },
    ),
    Row(
        "rid",
        "a name for /abort_request; of a list of prompts, one or a list",
        {"text": TWO, "rid": ["mine", "yours"]},
    ),
    Row(
        "stream",
        "events as tokens come",
        {"stream": True},
        at={GENERATE: {"text": TWO, "stream": True}},
    ),
    Row(
        "stream_options",
        "`include_usage`, `continuous_usage_stats`",
        at={
            path: {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            for path in (CHAT, TEXT)
        }
        | {RESPONSES: {"stream": True, "stream_options": {"include_obfuscation": False}}},
    ),
    Row(
        "max_tokens",
        "most tokens of a choice; 0 scores the prompt (not of chats)",
        {"max_tokens": 9},
    ),
    Row("max_completion_tokens", "the same", {"max_completion_tokens": 9}),
    Row("max_output_tokens", "the same", {"max_output_tokens": 9}),
    Row("min_tokens", "no end before so many", {"min_tokens": 20, "stop": ["sleep"]}),
    Row("temperature", "0 is greedy; default: the model's, or else 1; /generate: 1", RANDOM),
    Row("top_p", "nucleus", RANDOM | {"top_p": 0.7}),
    Row("top_k", "the k best alone", RANDOM | {"top_k": 5}),
    Row("min_p", "relative to the best", RANDOM | {"min_p": 0.1}),
    Row("seed", "the same seed, the same text", {"temperature": 1.0, "seed": 11}),
    Row("frequency_penalty", "a token's count times this", {"frequency_penalty": 0.5}),
    Row("presence_penalty", "once a token has come", {"presence_penalty": 0.5}),
    Row("repetition_penalty", "divides logits of tokens seen", {"repetition_penalty": 1.1}),
    Row("logit_bias", "added to logits", {"logit_bias": {"20": 5, "30": -100}}),
    Row("stop", "texts that end it", {"stop": ["sleep", "\n2"]}),
    Row("stop_token_ids", "tokens that end it", {"stop_token_ids": [300, 1223]}),
    Row(
        "include_stop_str_in_output",
        "keep that text",
        {"stop": ["tips"], "include_stop_str_in_output": True},
    ),
    Row("ignore_eos", "go on behind the end", {"ignore_eos": True}),
    Row(
        "skip_special_tokens",
        "leave them out of the text",
        {"skip_special_tokens": False, "ignore_eos": True},
    ),
    Row(
        "n",
        "choices of a prompt",
        {"n": 2} | RANDOM,
        at={GENERATE: {"text": TWO, "n": 2, "stream": True} | RANDOM},
    ),
    Row(
        "best_of",
        "choices that are made; the n likeliest a token are kept",
        {"best_of": 3} | RANDOM,
    ),
    Row("echo", "the prompt before the text", {"echo": True, "logprobs": 2}),
    Row(
        "logprobs",
        "of each token, and of the best ones",
        at={
            CHAT: {"logprobs": True, "top_logprobs": 2},
            TEXT: {"logprobs": 2},
            GENERATE: {"text": TWO, "return_logprob": [True, False]},
        },
    ),
    Row(
        "top_logprobs",
        "how many of the best",
        at={
            CHAT: {"logprobs": True, "top_logprobs": 3},
            RESPONSES: {"top_logprobs": 3},
            GENERATE: {"return_logprob": True, "top_logprobs_num": 3, "stream": True},
        },
    ),
    Row(
        "logprob_start_len",
        "first token of the prompt that has one",
        {"return_logprob": True, "logprob_start_len": 2},
    ),
    Row(
        "return_text_in_logprobs",
        "their texts as well",
        {"return_logprob": True, "return_text_in_logprobs": True},
    ),
    Row("prompt_logprobs", "of the prompt's tokens; not streamed", {"prompt_logprobs": 2}),
    Row("include", "`message.output_text.logprobs`", {"include": ["message.output_text.logprobs"]}),
    Row(
        "return_token_ids",
        "of prompt and answer; /generate has those of the answer as `output_ids`",
        {"return_token_ids": True},
    ),
    Row(
        "response_format",
        "JSON, or of a schema",
        {"response_format": {"type": "json_object"}, "max_tokens": 40},
    ),
    Row(
        "structured_outputs",
        "JSON, schema, regex, choice or grammar",
        {"structured_outputs": {"regex": "[A-Z][a-z ]{30,40}[.]"}},
    ),
    Row("json_schema", "a schema as text", {"json_schema": SCHEMA_TEXT}),
    Row("regex", "the whole output matches", {"regex": "[A-Z][a-z ]{30,40}[.]"}),
    Row("ebnf", "Lark or GBNF", {"ebnf": "start: /[A-Z][a-z ]{30,40}[.]/"}),
    Row(
        "tools",
        "functions that may be called",
        at={CHAT: CALL | {"tool_choice": "auto"}, RESPONSES: FLAT_CALL | {"tool_choice": "auto"}},
    ),
    Row(
        "tool_choice",
        "`none`, `auto`, `required`, or one by name",
        at={CHAT: CALL, RESPONSES: FLAT_CALL},
    ),
    Row(
        "parallel_tool_calls",
        "false: one call",
        at={
            CHAT: CALL | {"parallel_tool_calls": False},
            RESPONSES: FLAT_CALL | {"parallel_tool_calls": False},
        },
    ),
    Row("max_tool_calls", "of OpenAI's own tools, which are not here", {"max_tool_calls": 1}),
    Row("reasoning_effort", "a variable of the chat template", {"reasoning_effort": "none"}),
    Row("reasoning", "`effort`, as above", {"reasoning": {"effort": "none"}}),
    Row(
        "chat_template_kwargs",
        "further variables",
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    Row(
        "speculative",
        "`enabled`, `num_steps`: how far this request is drafted for",
        {"speculative": {"num_steps": 1}},
        with_speculation="the same answer in other rounds",
    ),
    Row("priority", "the lowest number is served first; default 0", {"priority": -1}),
    Row("metadata", "any JSON; /v1/responses answers with it", {"metadata": {"a": [1, None]}}),
    Row("user", "accepted; nothing depends on it", {"user": "x"}),
    Row("prompt_cache_key", "accepted; the cache needs none", {"prompt_cache_key": "x"}),
    Row("safety_identifier", "accepted, not kept", {"safety_identifier": "x"}),
)


def own_name(path: str, name: str) -> str | None:
    """What an endpoint calls a field; None where it has none of that sort."""
    if path != GENERATE:
        return name if name in MODELS[path].model_fields else None
    native = NATIVE.get(name, name)
    known = {**NativeRequest.model_fields, **NativeSampling.model_fields}
    return native if native in known else None


@dataclass(frozen=True)
class Case:
    row: Row
    path: str
    body: Json

    @property
    def name(self) -> str:
        return f"{self.row.name} {self.path}"


def cases() -> Iterator[Case]:
    """Every row at every endpoint that has it."""
    for row in ROWS:
        for path in MODELS:
            if own_name(path, row.name) is not None:
                yield Case(row, path, _body(path, row.at.get(path, row.uses)))


def half(number: int) -> list[Case]:
    """Of the cases every other one, 0 or 1: each row is at every other of its endpoints, in both
    halves where it has one alone. Both have what a request says of drafts, and of the model, at
    each endpoint."""
    rows: dict[str, list[Case]] = {}
    for case in cases():
        rows.setdefault(case.row.name, []).append(case)
    return [
        case
        for turn, at in enumerate(rows.values())
        for place, case in enumerate(at)
        if (turn + place) % 2 == number or len(at) == 1 or case.row.name in ("model", "speculative")
    ]


def _body(path: str, uses: Json) -> Json:
    """Greedy where nothing else is asked for."""
    body = {"temperature": 0} | BASE[path] | uses
    if path != GENERATE:
        fits = {name: one for name, one in body.items() if name in MODELS[path].model_fields}
        assert fits.keys() == body.keys(), "a row uses what the endpoint has"
        return body
    renamed = {NATIVE.get(name, name): one for name, one in body.items()}
    params = {k: v for k, v in renamed.items() if k in NativeSampling.model_fields}
    own = {k: v for k, v in renamed.items() if k not in params}
    return {"sampling_params": params} | own
