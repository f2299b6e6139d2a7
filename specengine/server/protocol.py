"""Requests of OpenAI's chat and text completions, and of /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, FailFast, Field, model_validator

from specengine.core.errors import RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.sampling import MAX_LOGPROBS, SamplingParams
from specengine.server.fields import SamplingFields, are_tokens, is_token
from specengine.server.messages import Message
from specengine.server.streaming import Streaming
from specengine.server.strict import Strict
from specengine.server.structured import ResponseFormat
from specengine.server.tool_fields import ToolFields


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


# Fields of SGLang's that its router adds to every request.
SGLANG_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
}


class GenerationRequest(SamplingFields):
    """What chat and text completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = Field(default=None, ge=1)
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = Field(
        default=None, description="of the prompt's tokens, each with so many of the best"
    )
    return_token_ids: bool | None = Field(default=None, description="of prompt and answer")
    user: str | None = Field(default=None, description="accepted; nothing depends on it")
    metadata: Any = Field(default=None, description="any JSON; accepted, not kept")

    @model_validator(mode="after")
    def _streams_fit(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs are not streamed; leave one out", "prompt_logprobs")
        return self

    @property
    def streaming(self) -> Streaming | None:
        """None where the answer is to come whole."""
        if not self.stream:
            return None
        options = self.stream_options or StreamOptions()
        return Streaming(bool(options.include_usage), bool(options.continuous_usage_stats))

    def grammar(self) -> GrammarSpec | None:
        format = self.response_format
        asked, other = None if format is None else format.grammar(), super().grammar()
        if asked is not None and other is not None:
            raise RequestError(
                "response_format and structured_outputs both ask for a form; give one of them",
                "structured_outputs",
            )
        return asked or other


class ChatRequest(ToolFields, GenerationRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SGLANG_DEFAULTS,
        "audio": (),
        "continue_final_message": (False,),
        "function_call": ("none",),
        "functions": (),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "separate_reasoning": (True,),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_reasoning": (True,),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_cache_key: str | None = Field(default=None, description="the cache needs no key")
    safety_identifier: str | None = Field(default=None, description="accepted, not kept")

    def to_sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """defaults: of the fields that the request leaves out. Raises RequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        limit = self.max_completion_tokens
        return self.sampling(
            defaults,
            max_tokens=self.max_tokens if limit is None else limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


Prompt = str | list[int]


def as_prompts(value: Any) -> list[Prompt]:
    """A text, token ids, or a list of either -> the list."""
    prompts = value if isinstance(value, list) and value and not is_token(value[0]) else [value]
    for prompt in prompts:
        if not isinstance(prompt, str) and not are_tokens(prompt):
            raise ValueError(
                "must be a text, a list of texts, a list of token ids, or a list of such lists"
            )
    return prompts


class CompletionRequest(GenerationRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": (), **SGLANG_DEFAULTS}

    prompt: Annotated[list[Any], BeforeValidator(as_prompts)] = Field(
        description="a text, a list of texts, a list of token ids, or a list of such lists"
    )
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = 16
    best_of: int | None = Field(
        default=None, ge=1, description="choices that are made; the n likeliest a token are kept"
    )

    @model_validator(mode="after")
    def _best_of_fits(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.num_kept:
            raise RequestError(f"best_of ({self.best_of}) is less than n", "best_of")
        if self.best_of is not None and self.best_of > self.num_kept and self.stream:
            raise RequestError("the best are known at the end: best_of has no stream", "best_of")
        return self

    @property
    def num_kept(self) -> int:
        """Choices of a prompt that are answered with."""
        return self.n or 1

    @property
    def is_prompt_only(self) -> bool:
        """Nothing is to be generated: with echo and logprobs, the prompt is scored."""
        return self.max_tokens == 0

    def to_sampling(self, defaults: Mapping[str, float]) -> SamplingParams:
        """defaults: of the fields that the request leaves out. Raises RequestError."""
        limit = 1 if self.is_prompt_only else self.max_tokens
        made, logprobs = self.best_of or self.num_kept, self.logprobs
        of_prompt = [self.prompt_logprobs, logprobs if self.echo else None]
        asked = [one for one in of_prompt if one is not None]
        return self.sampling(
            defaults,
            max_tokens=16 if limit is None else limit,
            n=made,
            logprobs=0 if logprobs is None and made > self.num_kept else logprobs,
            prompt_logprobs=max(asked, default=None),
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
