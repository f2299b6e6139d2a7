"""litellm, with the server as an endpoint of OpenAI's kind."""

from __future__ import annotations

import json

import litellm
from checks import API, CITY, MODEL, QUESTION, passed

MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
FIELDS = {"model": f"openai/{MODEL}", "api_base": API, "api_key": "none", "temperature": 0}

answer = litellm.completion(**FIELDS, messages=MESSAGES, max_tokens=30)
text = answer.choices[0].message.content
assert answer.usage.completion_tokens == 30
stream = litellm.completion(**FIELDS, messages=MESSAGES, max_tokens=30, stream=True)
assert "".join(one.choices[0].delta.content or "" for one in stream) == text
passed("completion, whole and streamed")

called = litellm.completion(
    **FIELDS, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=100
)
(call, *_) = called.choices[0].message.tool_calls
assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
passed("tools")

answer = litellm.text_completion(**FIELDS, prompt="Once upon a time", max_tokens=10)
assert answer.choices[0].text
passed("text completion")

answer = litellm.responses(**FIELDS, input=QUESTION, max_output_tokens=30)
assert answer.output[0].content[0].text == text
events = list(litellm.responses(**FIELDS, input=QUESTION, max_output_tokens=30, stream=True))
assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == text
passed("responses, whole and streamed")
