"""Engines whose target runs in pieces give the tokens that they give without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.exc import TorchDynamoException

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.errors import ModelLoadError
from specengine.engine import piecewise_build
from specengine.runner.fallbacks import TOO_MANY_TOKENS
from tests.draft import eagle_checkpoints as checkpoints
from tests.support.fake_platform import use_fake_platform
from tests.support.families import save_small_model
from tests.support.rounds import ON_CPU

PROMPTS = [
    "abcabcabcabcabc",
    "The quick brown fox",
    "x",
    "to be or not to be, that is the question: to be or not to be, that is " * 2,
    "0123456789" * 9,
]
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"page_size": 16, "chunked_prefill_size": 16},
    "mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
}
SIZES = (1, 2, 7, 16, 40, 100, 512)
SLOW = pytest.mark.slow
IN_PIECES = {"cuda_graph_mode": "piecewise", "piecewise_cuda_graph_tokens": SIZES}
QUICK = {("chunks", False)}  # the others: make test-all
CASES = [
    pytest.param(setting, drafts, marks=() if (setting, drafts) in QUICK else (pytest.mark.slow,))
    for setting in SETTINGS
    for drafts in (False, True)
]


@pytest.fixture(scope="module")
def target(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces") / "target"
    return checkpoints.almost_bigram(folder, small_models["llama"], 0.03)


@pytest.fixture(scope="module")
def eagle3(target: Path, tmp_path_factory: pytest.TempPathFactory) -> SpecConfig:
    draft = tmp_path_factory.mktemp("drafts") / "eagle3"
    checkpoints.oracle_eagle3(draft, target, 250, focus=20.0)
    return SpecConfig(algorithm="EAGLE3", adaptive=False, draft_model_path=str(draft), num_steps=3)


def run(llm: LLM) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    outputs = [one.token_ids for one in llm.generate(PROMPTS, sampling)]
    llm.engine.scheduler.check_invariant()
    return outputs


def make(target: Path, spec: SpecConfig | None, setting: str, **flags: Any) -> LLM:
    flags = {"dtype": "float32", "max_total_tokens": 4096, **SETTINGS[setting], **flags}
    return LLM(str(target), spec, **flags)


@pytest.mark.parametrize(("setting", "drafts"), CASES)
def test_pieces_change_no_token(
    setting: str, drafts: bool, target: Path, eagle3: SpecConfig
) -> None:
    """At first, and again on what the cache has by then; accepted drafts are the same too."""
    spec = eagle3 if drafts else None
    eager = make(target, spec, setting, cuda_graph_mode="none")
    cut = make(target, spec, setting, **IN_PIECES)
    expected = run(eager), run(eager)
    assert (run(cut), run(cut)) == expected
    mine, its = (llm.engine.scheduler.spec_totals for llm in (eager, cut))
    assert mine == its
    assert cut.engine.scheduler.num_cached_tokens > 100
    stats = cut.engine.stats()
    assert stats.graphs["piecewise"].replays > 15
    assert stats.num_eager_forwards == 0
    assert eager.engine.stats().num_eager_forwards == stats.num_graph_forwards


def test_longer_prompts_than_the_largest_size_run_eagerly_and_are_counted(target: Path) -> None:
    flags = IN_PIECES | {"piecewise_cuda_graph_tokens": (1, 8, 64)}
    llm = make(target, None, "whole prompts", **flags)
    assert run(llm) == run(make(target, None, "whole prompts"))
    stats = llm.engine.stats()
    assert stats.graphs["piecewise"].fallbacks == {TOO_MANY_TOKENS: stats.num_eager_forwards}
    assert stats.num_eager_forwards == 1  # all prompts together


@ON_CPU
@pytest.mark.parametrize("mode", ["full-and-piecewise", pytest.param("piecewise", marks=SLOW)])
def test_captured_pieces_change_no_token(
    mode: str, target: Path, eagle3: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs of a fake accelerator, beside rounds on the device; addresses are checked."""
    expected = run(make(target, eagle3, "mixed"))
    fake = use_fake_platform(monkeypatch)
    flags = IN_PIECES | {"cuda_graph_mode": mode, "cuda_graph_bs": (1, 2, 8)}
    llm = make(target, eagle3, "mixed", debug_cuda_graph=True, device="cpu", **flags)
    assert (run(llm), run(llm)) == (expected, expected)
    graphs, runner = llm.engine.stats().graphs, llm.engine.parts.worker.runner
    assert (llm.engine.device_rounds is None) == (mode == "piecewise")
    assert graphs["piecewise"].captures == len(runner.pieces.cache.captured) > 1
    assert graphs["piecewise"].replays > 4
    assert fake.num_replays > graphs["piecewise"].replays * (runner.model.num_layers + 1)


@ON_CPU
def test_models_with_recurrent_state_have_pieces_without_being_asked(
    small_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No whole graph holds their prompts. One that cannot be traced does without, unless asked."""
    kinds = ["linear_attention", "full_attention"]  # one layer each, as tracing takes long
    folder = save_small_model("qwen3next", tmp_path, 5, num_hidden_layers=2, layer_types=kinds)
    for path in small_models["llama"].glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    expected = run(make(folder, None, "whole prompts", device="cpu"))
    use_fake_platform(monkeypatch)
    flags: dict[str, Any] = {"device": "cpu", "cuda_graph_bs": (1, 2, 8)}
    llm = make(folder, None, "whole prompts", **flags)
    assert run(llm) == expected
    assert llm.engine.stats().graphs["piecewise"].replays > 0

    def refuse(*_: Any) -> Any:
        raise TorchDynamoException("a graph break")

    monkeypatch.setattr(piecewise_build, "PiecewiseForwards", refuse)
    llm = make(folder, None, "whole prompts", **flags)
    assert run(llm) == expected
    assert "piecewise" not in llm.engine.stats().graphs
    with pytest.raises(ModelLoadError, match="a graph break"):
        make(folder, None, "whole prompts", cuda_graph_mode="full-and-piecewise", **flags)
