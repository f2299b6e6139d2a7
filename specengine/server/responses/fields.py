"""What /v1/responses takes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, field_validator

from specengine.core.errors import RequestError
from specengine.core.sampling import MAX_LOGPROBS
from specengine.server.errors import ApiError, of_validation
from specengine.server.fields import SamplingFields
from specengine.server.protocol import ChatRequest
from specengine.server.responses.items import Item, as_items, as_turns
from specengine.server.strict import Strict
from specengine.server.tool_fields import MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"
# Fields of a chat request by the names that this endpoint has for them.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class Reasoning(Strict):
    """summary: "auto" leaves it to the server, which writes none: reasoning comes whole."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context": ("auto",),
        "generate_summary": ("auto",),
        "mode": ("standard",),
        "summary": ("auto",),
    }

    effort: str | None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = Field(default=None, description="accepted; nothing depends on it")
    strict: bool | None = Field(default=None, description="accepted; it always is")

    def for_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        if self.name is None or self.schema_ is None:
            raise RequestError("text.format needs name and schema", "text.format")
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextConfig(Strict):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class FunctionTool(Strict):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class ResponseStreamOptions(Strict):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}


def _known_choice(value: Any) -> Any:
    is_named = isinstance(value, dict) and value.get("type") == "function"
    if value is not None and value not in ("none", "auto", "required") and not is_named:
        raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": ...}')
    return value


class ResponsesRequest(SamplingFields):
    """Stateless: store may be false alone, and `input` holds the whole conversation."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("access_programs", "background_options", "context_management"), ()),
        **dict.fromkeys(("conversation", "moderation", "previous_response_id", "prompt"), ()),
        "background": (False,),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    }
    instead: ClassVar[dict[str, str]] = {
        **SamplingFields.instead,
        **dict.fromkeys(("max_tokens", "max_new_tokens"), "max_output_tokens"),
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
    }

    model: str
    input: Annotated[
        list[Any],
        BeforeValidator(as_items),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}),
    ] = Field(description="a text, or messages, function calls, their outputs and reasoning")
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | None, BeforeValidator(_known_choice)
    ] = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(default=None, description="of OpenAI's own tools: no effect")
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    prompt_cache_key: str | None = Field(default=None, description="the cache needs no key")
    safety_identifier: str | None = Field(default=None, description="accepted, not kept")
    user: str | None = Field(default=None, description="accepted; nothing depends on it")
    metadata: Any = Field(default=None, description="any JSON; answered with, not kept")

    @field_validator("include")
    @classmethod
    def _known_includes(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in (LOGPROBS, "reasoning.encrypted_content"):
                raise ValueError(f"{name!r} is not supported; leave it out")
        return value

    @property
    def items(self) -> list[Item]:
        return self.input

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def to_chat(self) -> ChatRequest:
        """The same as a chat. Raises RequestError and ApiError, with the names of this endpoint."""
        format = self.text and self.text.format
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        fields = {
            **self.model_dump(include={*SamplingFields.model_fields}, by_alias=True),
            "model": self.model,
            "messages": as_turns(self.instructions, self.items),
            "max_completion_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else [one.for_chat() for one in self.tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "response_format": format and format.for_chat(),
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
        }
        try:
            return ChatRequest.model_validate(fields)
        except RequestError as error:
            raise renamed(error) from None
        except ValidationError as error:
            found = of_validation(error.errors()[0])
            param = _renamed(found.param or "input")
            raise ApiError(400, found.message.replace(found.param or "", param), param) from None


def renamed(error: RequestError) -> RequestError:
    """An error of a chat, under the names of this endpoint."""
    message = str(error)
    for chat, own in _NAMES.items():
        message = message.replace(chat, own)
    return RequestError(message, error.param and _renamed(error.param))


def _renamed(param: str) -> str:
    head = param.partition("[")[0].partition(".")[0]
    if head == "messages":
        return "input"  # items are no messages: their numbers differ
    return param.replace(head, _NAMES.get(head, head), 1).replace(".function", "")
