"""Requests of the OpenAI API, as this server takes them.

Every field is honoured or refused by name; null stands for a field's default, as in OpenAI's API.
Fields beyond OpenAI's (top_k, min_p, ignore_eos, ...) are those of SamplingParams.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, FailFast, Field, model_validator

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.sampling import MAX_LOGPROBS, SamplingParams, SpecControl
from specengine.server.messages import Message
from specengine.server.streaming import Streaming
from specengine.server.strict import Strict
from specengine.server.structured import ResponseFormat, StructuredOutputs
from specengine.server.tool_fields import ToolFields

# Fields of SamplingParams that this API calls or counts otherwise, or that the server sets itself;
# it has all others under their names.
_OTHERWISE = {
    *("max_tokens", "logprobs", "prompt_logprobs", "grammar", "speculative"),
    "visible_special_ids",
}
_SHARED = tuple(one.name for one in fields(SamplingParams) if one.name not in _OTHERWISE)


def _as_strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_bias(value: Any) -> Any:
    """JSON keys are strings; here they are token ids."""
    if not isinstance(value, dict):
        return value
    if not all(str(key).isdecimal() for key in value):
        raise ValueError("keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


class StreamOptions(Strict):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(default=None, description="in every chunk")

    @model_validator(mode="after")
    def _continuous_belongs_to_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            name = "stream_options.continuous_usage_stats"
            raise RequestError(f"{name} needs include_usage to be true", name)
        return self


class Speculative(Strict):
    """How far this request may be drafted for; its answer does not depend on it."""

    enabled: bool | None = None
    num_steps: int | None = None

    def control(self) -> SpecControl:
        """Raises RequestError."""
        return SpecControl(self.enabled is not False, self.num_steps)


class GenerationRequest(Strict):
    """What chat and text completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_as_bias)] = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_as_strings)] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = Field(default=None, ge=1)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative: Speculative | None = None
    user: str | None = Field(default=None, description="accepted; nothing depends on it")
    metadata: Any = Field(default=None, description="any JSON; accepted, not kept")

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", "stream_options")
        return self

    @property
    def streaming(self) -> Streaming | None:
        """None where the answer is to come whole."""
        if not self.stream:
            return None
        options = self.stream_options or StreamOptions()
        return Streaming(bool(options.include_usage), bool(options.continuous_usage_stats))

    def sampling(self, **values: Any) -> SamplingParams:
        """SamplingParams of the fields that are set, and of `values`. Raises RequestError."""
        given = {name: getattr(self, name) for name in _SHARED}
        given["grammar"] = self._grammar()
        given["speculative"] = self.speculative and self.speculative.control()
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None}, **values
        )

    def _grammar(self) -> GrammarSpec | None:
        format, outputs = self.response_format, self.structured_outputs
        asked = None if format is None else format.grammar()
        if asked is not None and outputs is not None:
            raise RequestError(
                "response_format and structured_outputs both ask for a form; give one of them",
                "structured_outputs",
            )
        return asked if outputs is None else outputs.grammar()


class ChatRequest(ToolFields, GenerationRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": ("none",),
        "functions": (),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_cache_key: str | None = Field(default=None, description="the cache needs no key")
    safety_identifier: str | None = Field(default=None, description="accepted, not kept")

    def to_sampling(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        limit = self.max_completion_tokens
        return self.sampling(
            max_tokens=self.max_tokens if limit is None else limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


Prompt = str | list[int]


def _as_prompts(value: Any) -> list[Prompt]:
    """A text, token ids, or a list of either -> the list."""
    prompts = value if isinstance(value, list) and value and not _is_token(value[0]) else [value]
    for prompt in prompts:
        is_ids = isinstance(prompt, list) and all(_is_token(token) for token in prompt)
        if not isinstance(prompt, str) and not (is_ids and prompt):
            raise ValueError(
                "must be a text, a list of texts, a list of token ids, or a list of such lists"
            )
    return prompts


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CompletionRequest(GenerationRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"best_of": (1,), "suffix": ()}

    prompt: Annotated[list[Any], BeforeValidator(_as_prompts)] = Field(
        description="a text, a list of texts, a list of token ids, or a list of such lists"
    )
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = 16

    @property
    def is_prompt_only(self) -> bool:
        """Nothing is to be generated: with echo and logprobs, the prompt is scored."""
        return self.max_tokens == 0

    def to_sampling(self) -> SamplingParams:
        limit = 1 if self.is_prompt_only else self.max_tokens
        return self.sampling(
            max_tokens=16 if limit is None else limit,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
    skip_special_tokens: bool = False
