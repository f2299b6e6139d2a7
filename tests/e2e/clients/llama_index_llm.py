"""llama-index, through its model for servers of OpenAI's kind."""

from __future__ import annotations

import asyncio
from typing import Literal

from checks import API, MODEL, QUESTION, passed
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

llm = OpenAILike(
    model=MODEL,
    api_base=API,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
    temperature=0.0,
    max_tokens=500,
    max_retries=0,
)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the small model would go on with other fields

    city: Literal["Paris", "Rome"]


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather of a city."""
    return f"{city}: 24 degrees"


text = llm.chat(MESSAGES).message.content
assert text
assert "".join(one.delta or "" for one in llm.stream_chat(MESSAGES)) == text
passed("chat, whole and streamed")

assert llm.complete("Once upon a time").text
passed("complete")

tool = FunctionTool.from_defaults(weather, fn_schema=City)
answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
(call, *_) = llm.get_tool_calls_from_response(answer)
assert call.tool_kwargs["city"] in ("Paris", "Rome")
passed("tools")


async def ask_agent() -> None:
    agent = FunctionAgent(tools=[tool], llm=llm, initial_tool_choice="required")
    answer = await agent.run(QUESTION)
    assert answer.tool_calls[0].tool_kwargs["city"] in ("Paris", "Rome")


asyncio.run(ask_agent())
passed("an agent")
