"""/v1/embeddings through the real openai client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from specengine.core.errors import QueueFullError, RequestError
from tests.server.test_more_fields import BODIES

PATH = "/v1/embeddings"


@pytest.fixture
def embedder(engine: Any) -> Any:
    engine.is_embedding = True
    return engine


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_vectors_stand_in_the_order_of_their_texts(
    lenient_client: OpenAI, embedder: Any, encoding: Any
) -> None:
    """Without an encoding the client asks for base64, and unpacks it."""
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = lenient_client.embeddings.create(model="fake", input=["abc", "b"], **options)
    assert [one.index for one in answer.data] == [0, 1]
    assert sorted(embedder.prompts) == ["abc", "b"]
    if encoding != "base64":
        assert answer.data[0].embedding == pytest.approx([3.0, 64 / 3])
        assert answer.data[1].embedding == pytest.approx([1.0, 65 / 3])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 4
    assert len({one.rpartition("-")[0] for one in embedder.rids}) == 1


@pytest.mark.parametrize("given", ["ab", [64, 65], [[64, 65]]])
def test_forms_of_an_input(lenient_client: OpenAI, embedder: Any, given: Any) -> None:
    answer = lenient_client.embeddings.create(model="fake", input=given)
    assert embedder.prompts == ["ab"]
    assert len(answer.data) == 1


def test_a_model_that_generates_has_no_embeddings(site: Any, engine: Any) -> None:
    error = site.refusal(PATH, 501, model="fake", input="x")
    assert (error["param"], error["code"]) == ("model", "not_supported")
    assert "modules.json" in error["message"]


@pytest.mark.parametrize("path", [*BODIES, "/v1/responses", "/generate"])
def test_an_embedding_model_generates_nothing(site: Any, embedder: Any, path: str) -> None:
    bodies = BODIES | {"/v1/responses": {"model": "fake", "input": "x"}, "/generate": {"text": "x"}}
    assert "/v1/embeddings" in site.refusal(path, 501, **bodies[path])["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": "x" * 250}, "input"),
        ({"input": ["x"] * 129}, "input"),
        ({"dimensions": 3}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"mood": 1}, "mood"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_served_is_refused_by_name(
    site: Any, embedder: Any, fields: dict[str, Any], param: str
) -> None:
    assert site.refusal(PATH, 400, **({"model": "fake", "input": "x"} | fields))["param"] == param


def test_one_text_that_fails_fails_the_request(site: Any, embedder: Any) -> None:
    async def embed(prompt_ids: list[int], rid: str) -> list[float]:
        raise QueueFullError("full")

    embedder.embed = embed
    assert site.refusal(PATH, 503, model="fake", input=["a", "b"])["code"] == "queue_full"


def test_token_ids_that_the_engine_refuses_are_the_input(site: Any, embedder: Any) -> None:
    async def embed(prompt_ids: list[int], rid: str) -> list[float]:
        raise RequestError("prompt token ids must lie in 0..256", "prompt")

    embedder.embed = embed
    assert site.refusal(PATH, 400, model="fake", input=[999])["param"] == "input"
