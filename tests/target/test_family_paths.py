"""Every registered family on every fast path, with the reference kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.core.config import ModelConfig
from specengine.core.forward_mode import ForwardMode
from specengine.layers.compute_paths import (
    COMPILED,
    FAST_HEADS,
    FAST_PATHS,
    FEW_ROWS,
    HEAD_TOP,
    SPLIT_PREFILL,
    ComputePath,
)
from specengine.runner.loader.load import load_model
from specengine.runner.loader.source import resolve_model
from specengine.target.registry import find_model_class
from tests.support.families import FAMILIES
from tests.support.fast_paths import Forward, Step, let_fuse_norms, let_take, run_steps
from tests.target.conftest import MiniRunner

BY_LAYER = (COMPILED, FEW_ROWS)  # the others take all layers or none
PROMPTS = [[(7 * i * i + 3 * i) % 300 for i in range(12)], [5, 9, 301]]
# 0 ─┬─ 1 ─── 3          0 ─── 1 ─┬─ 2
#    └─ 2 ─┬─ 4 ─── 6             └─ 3
#          └─ 5
NODES = [[9, 4, 77, 31, 8, 200, 4], [31, 9, 9, 100]]
PARENTS = [[-1, 0, 0, 1, 2, 2, 4], [-1, 0, 1, 1]]
STEPS = [
    Step(ForwardMode.EXTEND, PROMPTS),
    Step(ForwardMode.DECODE, [[4], [8]]),
    Step(ForwardMode.TARGET_VERIFY, NODES, PARENTS),
]


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, small_models: dict[str, Path]) -> Any:
    """Its weights as a GPU keeps them; loaded once for all paths, which change nothing of it."""
    source = resolve_model(ModelConfig(model=str(small_models[request.param])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specengine.runner.loader.load.pack_linears", lambda *_: None)
        made = load_model(source, find_model_class, torch.float32, torch.device("cpu"))
    assert type(made).__name__ == FAMILIES[request.param]
    return made


@pytest.fixture(scope="module")
def plain(model: Any) -> list[Forward]:
    """Its forwards on no fast path."""
    with pytest.MonkeyPatch.context() as patch:
        return run_steps(MiniRunner(model), None, STEPS, patch)


@pytest.mark.parametrize("path", FAST_PATHS, ids=lambda path: path.name)
def test_family_on_a_fast_path_equals_the_plain_path(
    path: ComputePath, model: Any, plain: list[Forward], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, a decoded token of each request, and trees with branches."""
    takes = [path.takes(one) for one in model.layer_specs(model.config)]
    is_taken = any(takes) if path in BY_LAYER else all(takes)
    forwards = run_steps(MiniRunner(model), path, STEPS, monkeypatch)
    for step, found, expected in zip(STEPS, forwards, plain, strict=True):
        has_path = path is not SPLIT_PREFILL or step.mode is ForwardMode.EXTEND
        assert found.was_taken == (is_taken and has_path)
        found.assert_near(expected)


def test_family_with_norms_in_fused_attention_equals_norms_before_it(
    model: Any, plain: list[Forward], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are RMS norms of each head by itself, with nothing between them and rotation."""
    runner = MiniRunner(model)
    given = let_fuse_norms(runner.backend, monkeypatch)
    forwards = run_steps(runner, None, STEPS, monkeypatch)
    for found, expected in zip(forwards, plain, strict=True):
        found.assert_near(expected)
    specs = [one for one in model.layer_specs(model.config) if one.gated_delta is None]
    fused = [
        one.qk_norm and one.norm == "rms" and one.query_temperature is None and one.has_rotary
        for one in specs
        if not (one.qk_norm_whole or one.qk_norm_by_head or one.latent)
    ]
    assert len(given) == len(STEPS) * sum(fused)


@pytest.mark.parametrize("path", FAST_HEADS, ids=lambda path: path.name)
def test_family_with_a_fused_head_equals_its_logits(
    path: ComputePath, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, calls = model.head, list[object]()
    let_take(path, calls, monkeypatch)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    logits = head.logits(hidden)
    assert torch.equal(head.best(hidden), logits.argmax(-1))
    top = head.top(hidden, 4)
    assert (top is not None) == (path is HEAD_TOP and path.takes(head.spec))
    if top is not None:
        assert torch.equal(top.best()[0], logits.topk(4).indices)
        torch.testing.assert_close(top.log_sums(), logits.logsumexp(-1))
    assert bool(calls) == path.takes(head.spec)
