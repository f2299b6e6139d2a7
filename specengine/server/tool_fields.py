"""Fields of a chat request about tools, reasoning and the chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from specengine.core.errors import RequestError
from specengine.server.strict import Strict
from specengine.server.tools.format import NO_PARAMETERS, Tool

MAX_TOOLS = 128
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionDefinition(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        return Tool(self.name, self.parameters or NO_PARAMETERS, bool(self.strict))


class ToolDefinition(Strict):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": function}


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


def _known_choice(value: Any) -> Any:
    is_named = isinstance(value, dict) and value.get("type") == "function"
    if value is not None and value not in ("none", "auto", "required") and not is_named:
        raise ValueError(
            'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        )
    return value


Choice = Literal["none", "auto", "required"] | NamedTool | None


class ToolFields(Strict):
    """tool_choice: "none" leaves the tools out of the prompt; "required" and a named function
    constrain the answer."""

    tools: list[ToolDefinition] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Choice, BeforeValidator(_known_choice)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _tools_belong_together(self) -> ToolFields:
        names = [one.function.name for one in self.tools or ()]
        for name in names:
            if names.count(name) > 1:
                raise RequestError(f"two tools are called {name!r}; rename one", "tools")
        named = self.named_tool
        if named is not None and named not in names:
            raise RequestError(
                f"tool_choice names {named!r}, which is not among the tools; add it to tools",
                "tool_choice",
            )
        if self.tool_choice == "required" and not names:
            raise RequestError("tool_choice needs tools; give at least one", "tool_choice")
        return self

    @property
    def named_tool(self) -> str | None:
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedTool) else None

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or self.named_tool is not None

    def usable_tools(self) -> list[Tool]:
        """Those that may be called."""
        if self.tool_choice == "none":
            return []
        tools = [one.function.tool() for one in self.tools or ()]
        return [one for one in tools if self.named_tool in (None, one.name)]

    def template_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else [t.for_template() for t in self.tools or ()]
