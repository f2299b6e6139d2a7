"""langchain-openai: messages, tools, structured output and an agent, on both of OpenAI's APIs."""

from __future__ import annotations

from typing import Literal

from checks import API, MODEL, QUESTION, passed
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # the small model would go on with other fields

    city: Literal["Paris", "Rome"]


@tool(args_schema=City)
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    return f"{city}: 24 degrees"


@wrap_model_call
def call_first(request, handler):
    """The small model calls nothing by itself."""
    has_called = any(isinstance(one, ToolMessage) for one in request.messages)
    choice = None if has_called else "required"
    return handler(request.override(tool_choice=choice, model_settings={"strict": True}))


for use_responses in (False, True):
    api = "responses" if use_responses else "chat"
    llm = ChatOpenAI(
        model=MODEL,
        base_url=API,
        api_key="none",
        temperature=0,
        max_tokens=700,
        max_retries=0,
        use_responses_api=use_responses,
        store=False if use_responses else None,
    )
    answer = llm.invoke(QUESTION)
    assert answer.text
    assert "".join(chunk.text for chunk in llm.stream(QUESTION)) == answer.text
    passed(f"{api}: invoke and stream")
    called = llm.bind_tools(
        [weather], tool_choice="required", strict=True, parallel_tool_calls=False
    ).invoke(QUESTION)
    call = called.tool_calls[0]
    assert call["args"]["city"] in ("Paris", "Rome")
    outputs = [
        ToolMessage(weather.invoke(c["args"]), tool_call_id=c["id"]) for c in called.tool_calls
    ]
    last = llm.bind_tools([weather]).invoke([HumanMessage(QUESTION), called, *outputs])
    assert last.text
    passed(f"{api}: tools")
    for method in ("json_schema", "function_calling"):
        found = llm.with_structured_output(City, method=method).invoke(QUESTION)
        assert found.city in ("Paris", "Rome")
    passed(f"{api}: structured output")
    brief = llm.model_copy(
        update={"max_tokens": 200, "model_kwargs": {"parallel_tool_calls": False}}
    )
    agent = create_agent(brief, tools=[], response_format=ToolStrategy(City))
    state = agent.invoke({"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 12})
    assert state["structured_response"].city in ("Paris", "Rome")
    caller = create_agent(brief, tools=[weather], middleware=[call_first])
    state = caller.invoke({"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 12})
    kinds = [one.type for one in state["messages"]]
    assert kinds == ["human", "ai", "tool", "ai"], kinds
    assert "24 degrees" in state["messages"][2].text
    passed(f"{api}: agents")
