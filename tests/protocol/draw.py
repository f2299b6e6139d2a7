"""Draws docs/reference/protocol.md: `python -m tests.protocol.draw`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from specengine.server.embeddings import EmbeddingRequest
from specengine.server.messages import Message
from specengine.server.native.sampling import NativeSampling
from specengine.server.responses.fields import FunctionTool, Reasoning, TextConfig
from tests.protocol.table import GENERATE, MODELS, ROWS, own_name

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/protocol.md"
HEAD = """# Protocol

Which fields does each endpoint take, and what does speculation change?

This page is drawn from `tests/protocol/table.py` by `python -m tests.protocol.draw`. A test sends a
body that uses each field to a server that drafts (EAGLE-3, `--no-speculative-adaptive`) and to one
that does not, and compares the answers, greedy or of one seed. Field names of `/generate` are
SGLang's; ¹ stands for its `sampling_params`. An empty place: the endpoint does not have the field,
and refuses it by name.
"""
MIDDLE = """
## Fields that are known and refused

Each is a 400 that names the field, unless its value is null or one of those shown.
"""
TAIL = """
## Embeddings

`/v1/embeddings` takes {fields}. It drafts nothing. A model that generates answers it
with 501, and an embedding model so answers the others.
"""
# Objects whose fields OpenAI has more of.
OBJECTS: dict[str, type[BaseModel]] = {
    **MODELS,
    "`sampling_params`": NativeSampling,
    "`messages[]`": Message,
    "`reasoning`": Reasoning,
    "`text` of /v1/responses": TextConfig,
    "`tools[]` of /v1/responses": FunctionTool,
    "/v1/embeddings": EmbeddingRequest,
}


def drawn() -> str:
    columns = ["field", *MODELS, "what", "with speculation"]
    table = [_line(columns), _line(["---"] * len(columns))]
    for row in ROWS:
        cells = [_cell(path, row.name) for path in MODELS]
        table.append(_line([f"`{row.name}`", *cells, row.what, row.with_speculation]))
    refused = [_line(["where", "field", "allowed"]), _line(["---"] * 3), *_refused()]
    fields = ", ".join(f"`{name}`" for name in EmbeddingRequest.model_fields)
    parts = [HEAD, *table, MIDDLE, *refused, TAIL.format(fields=fields).rstrip()]
    return "\n".join(parts) + "\n"


def _cell(path: str, name: str) -> str:
    own = own_name(path, name)
    if own is None:
        return ""
    mark = "¹" if path == GENERATE and own in NativeSampling.model_fields else ""
    return ("yes" if own == name else f"`{own}`") + mark


def _refused() -> Iterator[str]:
    for place, model in OBJECTS.items():
        unsupported: dict[str, tuple[Any, ...]] = getattr(model, "unsupported", {})
        for name, harmless in sorted(unsupported.items()):
            values = ", ".join(f"`{_shown(one)}`" for one in harmless[:4])
            yield _line([place, f"`{name}`", values])


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(drawn())
