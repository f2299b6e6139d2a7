"""/v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BeforeValidator, Field
from starlette.requests import Request

from specengine.core.errors import RequestError
from specengine.engine.outgoing import request_id
from specengine.server.completions import encode_prompts
from specengine.server.job import check_context
from specengine.server.json_bytes import Json
from specengine.server.protocol import as_prompts
from specengine.server.request_log import record_of
from specengine.server.service import ServedEngine
from specengine.server.strict import Strict


class EmbeddingRequest(Strict):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"dimensions": ()}

    model: str
    input: Annotated[list[Any], BeforeValidator(as_prompts)] = Field(
        description="a text, a list of texts, a list of token ids, or a list of such lists"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: of float32 numbers, little-endian"
    )
    user: str | None = Field(default=None, description="accepted; nothing depends on it")


async def embed(engine: ServedEngine, body: EmbeddingRequest, request: Request) -> Json:
    """The answer. Raises ApiError or RequestError where the request cannot be served."""
    prompts = await encode_prompts(engine, body.input, "input")
    check_context(engine, prompts, "input")
    record, job = record_of(request.scope), uuid4().hex
    tasks = [
        asyncio.create_task(engine.embed(prompt, request_id(record.id, job, number)))
        for number, prompt in enumerate(prompts)
    ]
    try:
        vectors = await asyncio.gather(*tasks)
    except RequestError as error:  # engines call it a prompt
        raise RequestError(
            str(error), "input" if error.param == "prompt" else error.param
        ) from None
    finally:  # of an error, or a client that has gone
        for task in tasks:
            task.cancel()
    record.prompt_tokens = num_tokens = sum(map(len, prompts))
    is_packed = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": number,
            "embedding": _packed(vector) if is_packed else vector,
        }
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": engine.model_name, "usage": usage}


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
