"""instructor: pydantic models out of answers, in each of its modes that a server can serve."""

from __future__ import annotations

from typing import Literal

import instructor
from checks import API, MODEL, QUESTION, passed
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # the small model would go on with other fields

    city: Literal["Paris", "Rome"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(OpenAI(base_url=API, api_key="none", max_retries=0), mode=mode)
    found = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=City,
        max_retries=0,
        temperature=0,
    )
    assert found.city in ("Paris", "Rome")
    passed(f"mode {mode.name}")

client = instructor.from_openai(OpenAI(base_url=API, api_key="none", max_retries=0))
partial = client.chat.completions.create_partial(
    model=MODEL,
    messages=[{"role": "user", "content": QUESTION}],
    response_model=City,
    temperature=0,
)
*_, last = partial
assert last.city in ("Paris", "Rome")
passed("a model as it streams")
