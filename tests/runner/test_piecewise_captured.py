"""Pieces in CUDA graphs give what eager forwards give, at every size, padded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.runner.piecewise.pieces import Piece
from tests.support.families import FAMILIES
from tests.support.own_memory import count_own_memory

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

PROMPTS = ["abcabcabc", "The quick brown fox", "x", "to be or not to be, " * 30, "01234" * 18]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
EAGLE3 = SpecConfig(algorithm="EAGLE3", adaptive=False, num_steps=3)
MIXED: dict[str, Any] = {"chunked_prefill_size": 64, "enable_mixed_chunk": True}


def run(model: str, spec: SpecConfig | None, prompts: list[str], **flags: Any) -> Any:
    """Tokens at first and with what the cache has by then, and the engine."""
    llm = LLM(model, spec, **{"dtype": "float32", "max_total_tokens": 8192, **flags})
    return [[one.token_ids for one in llm.generate(prompts, GREEDY)] for _ in range(2)], llm


@pytest.mark.parametrize("family", FAMILIES)
def test_family_in_captured_pieces_gives_its_eager_tokens(
    family: str, small_models: dict[str, Path]
) -> None:
    folder, prompts = str(small_models[family]), PROMPTS[:3]
    expected, _ = run(folder, None, prompts, cuda_graph_mode="none")
    found, llm = run(folder, None, prompts, cuda_graph_mode="piecewise", debug_cuda_graph=True)
    assert found == expected
    stats = llm.engine.stats()
    assert stats.graphs["piecewise"].captures >= 2
    assert stats.num_eager_forwards == 0


@pytest.mark.parametrize("flags", [{}, MIXED, {"attention_backend": "torch"}], ids=str)
@pytest.mark.parametrize("mode", ["piecewise", "full-and-piecewise"])
@pytest.mark.parametrize("spec", [None, EAGLE3], ids=["plain", "EAGLE3"])
def test_pieces_beside_whole_graphs_change_no_token(
    spec: SpecConfig | None, mode: str, flags: dict[str, Any]
) -> None:
    expected, _ = run("tiny", spec, PROMPTS, cuda_graph_mode="none", **flags)
    found, llm = run("tiny", spec, PROMPTS, cuda_graph_mode=mode, debug_cuda_graph=True, **flags)
    assert found == expected
    pieces = llm.engine.parts.worker.runner.pieces
    sizes = [one.captured.keys() for one in pieces.graph.children() if isinstance(one, Piece)]
    assert all(one == pieces.cache.captured.keys() for one in sizes)


def test_compiled_pieces_give_the_tokens_of_eager_ones_and_are_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECENGINE_CACHE_DIR", str(tmp_path))
    expected, _ = run("tiny", None, PROMPTS, cuda_graph_mode="none")
    flags = {"cuda_graph_mode": "piecewise", "piecewise_compiler": "inductor"}
    counts = []
    for _ in range(2):
        found, llm = run("tiny", None, PROMPTS, **flags)
        assert found == expected
        made = llm.engine.parts.worker.runner.pieces.compiled
        counts.append((made.compiled, made.loaded))
    assert counts == [(3, 0), (0, 3)]


def test_capture_of_smaller_sizes_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use that of the largest again."""
    count_own_memory(monkeypatch)
    flags = {"load_format": "dummy", "max_total_tokens": 4096, "cuda_graph_mode": "piecewise"}
    llm = LLM("smollm2-shape", **flags, piecewise_cuda_graph_tokens=(256, 512, 1024, 2048))
    pieces = llm.engine.parts.worker.runner.pieces
    largest = pieces.runner.graph_memory.used
    assert largest > 0
    for capture in pieces.captures():
        capture()
    assert len(pieces.cache.captured) == 4
    assert pieces.runner.graph_memory.used < 2 * largest
