"""SmolLM2 fills in a JSON schema, with and without speculation alike."""

from __future__ import annotations

import json

import pytest

from specengine import GrammarSpec, SamplingParams, SpecConfig
from specengine.engine.chat_template import render_chat
from tests.e2e.conftest import Make

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {
        "capital": {"type": "string"},
        "languages": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["capital", "languages"],
    "additionalProperties": False,
}
QUESTION = "Give me facts about France as JSON: capital, languages."


def test_a_schema_is_filled_in(smollm2_llm: Make) -> None:
    params = SamplingParams(max_tokens=80, temperature=0.0, grammar=GrammarSpec.json_schema(SCHEMA))
    texts = []
    for spec in (None, SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=5)):
        llm = smollm2_llm(spec, max_total_tokens=1024)
        (one,) = llm.generate(
            [render_chat(llm.tokenizer, [{"role": "user", "content": QUESTION}])], params
        )
        assert one.completions[0].finish_reason.kind == "stop"
        texts.append(one.text)
    assert texts[0] == texts[1]
    answer = json.loads(texts[0])
    assert list(answer) == ["capital", "languages"]
    assert answer["capital"] == "Paris"
    assert len(answer["languages"]) <= 2
