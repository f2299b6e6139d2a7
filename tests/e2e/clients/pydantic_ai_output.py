"""pydantic-ai: its default output, a tool that must be called, on both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Literal

from checks import API, MODEL, QUESTION, passed
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the small model would go on with other fields

    city: Literal["Paris", "Rome"]


provider = OpenAIProvider(base_url=API, api_key="none")
settings = ModelSettings(temperature=0, max_tokens=700)


async def stream(agent: Agent) -> str:
    async with agent.run_stream(QUESTION) as answer:
        return await answer.get_output()


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    api, model = kind.__name__, kind(MODEL, provider=provider)
    text = Agent(model, model_settings=settings)
    said = text.run_sync(QUESTION).output
    assert said
    assert asyncio.run(stream(text)) == said
    passed(f"{api}: text, whole and streamed")
    agent = Agent(model, output_type=City, model_settings=settings)
    assert agent.run_sync(QUESTION).output.city in ("Paris", "Rome")
    assert asyncio.run(stream(agent)).city in ("Paris", "Rome")
    passed(f"{api}: default output, whole and streamed")
    native = Agent(model, output_type=NativeOutput(City), model_settings=settings)
    assert native.run_sync(QUESTION).output.city in ("Paris", "Rome")
    passed(f"{api}: native output")
