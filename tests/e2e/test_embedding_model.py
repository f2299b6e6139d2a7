"""Vectors of an embedding model, beside those of transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from specengine.core.config_sources import config_from_flags
from specengine.core.errors import ModelLoadError, RequestError
from specengine.engine.async_engine import AsyncEngine
from specengine.engine.build import build_engine

PROMPTS = [
    *([3, 14, 15, 9, 2, 6], [5, 3], [3, 14, 15, 9, 2, 7, 18, 2, 8, 18, 28]),
    [(7 * i * i + 3) % 300 for i in range(70)],
]


def save(directory: Path, source: Path, pooling: dict[str, Any], kinds: tuple[str, ...]) -> Path:
    """As sentence-transformers lays it out: the model without its head, and how to pool."""
    shutil.copytree(source, directory)
    (directory / "model.safetensors").unlink()
    AutoModel.from_pretrained(source).save_pretrained(directory)
    modules = [
        {"idx": k, "name": str(k), "path": f"{k}_{kind}" if k else "", "type": f"st.models.{kind}"}
        for k, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return directory


@contextmanager
def engine_of(directory: Path, **flags: Any) -> Iterator[AsyncEngine]:
    flags = {"dtype": "float32", "max_total_tokens": 512, "chunked_prefill_size": 4} | flags
    engine = AsyncEngine(build_engine(config_from_flags({"model": str(directory), **flags})))
    try:
        yield engine
    finally:
        engine.shutdown()


def vectors_of(engine: AsyncEngine) -> list[list[float]]:
    async def ask() -> list[list[float]]:
        asked = [engine.embed(ids, f"r-{number}") for number, ids in enumerate(PROMPTS)]
        first = await asyncio.gather(*asked)
        again = await asyncio.gather(
            *(engine.embed(ids, f"again-{number}") for number, ids in enumerate(PROMPTS))
        )  # now prefixes may be cached
        for one, other in zip(first, again, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
        return list(first)

    return asyncio.run(ask())


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
@pytest.mark.parametrize("normalises", [False, True])
def test_vectors_are_those_of_transformers(
    small_models: dict[str, Path], tmp_path: Path, mode: str, normalises: bool
) -> None:
    kinds = ("Transformer", "Pooling") + (("Normalize",) if normalises else ())
    config = {"word_embedding_dimension": 1, f"pooling_mode_{mode}": True, "include_prompt": True}
    directory = save(tmp_path / "m", small_models["qwen3"], config, kinds)
    reference = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with engine_of(directory, chunked_prefill_size=4 if normalises else 128) as engine:
        assert engine.is_embedding
        found = vectors_of(engine)
    for ids, vector in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            hidden = reference(torch.tensor([ids])).last_hidden_state[0]
        expected = hidden[-1] if mode == "lasttoken" else hidden.mean(0)
        if normalises:
            expected = torch.nn.functional.normalize(expected, dim=0)
        assert vector == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("pooling", "kinds", "names"),
    [
        ({"pooling_mode_cls_token": True}, ("Transformer", "Pooling"), "pooling_mode_lasttoken"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            ("Transformer", "Pooling"),
            "pooling_mode_lasttoken",
        ),
        ({"pooling_mode_mean_tokens": True}, ("Transformer", "Pooling", "Dense"), "Dense"),
    ],
)
def test_vectors_that_cannot_be_made_are_refused_at_start(
    small_models: dict[str, Path],
    tmp_path: Path,
    pooling: dict[str, Any],
    kinds: tuple[str, ...],
    names: str,
) -> None:
    directory = save(tmp_path / "m", small_models["qwen3"], pooling, kinds)
    with pytest.raises(ModelLoadError, match=names):
        build_engine(config_from_flags({"model": str(directory)}))


def test_a_model_that_generates_has_no_vectors(small_models: dict[str, Path]) -> None:
    with engine_of(small_models["llama"]) as engine:
        assert not engine.is_embedding
        with pytest.raises(RequestError, match="not an embedding model"):
            asyncio.run(engine.embed([1, 2], "r"))
