"""Which graphs an engine has where no flag says: pieces too, where a model has recurrent state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specengine.core.config import EngineConfig, GraphConfig, ModelConfig, ParallelConfig
from specengine.core.registry import ATTENTION_BACKENDS
from specengine.engine.resolve import resolve
from specengine.runner import attention
from specengine.runner.attention import make_attention_backends, runs_in_graphs
from tests.support.device_lengths import DeviceLengths
from tests.support.fake_platform import FakePlatform, use_fake_platform


def mode_of(graph: GraphConfig, keeps_state: bool, parallel: ParallelConfig | None = None) -> str:
    model = ModelConfig(model="x", device="cpu")
    config = EngineConfig(model=model, graph=graph, parallel=parallel or ParallelConfig())
    return resolve(config, 2048, None, keeps_state).graph.cuda_graph_mode


@pytest.mark.parametrize("keeps_state", [False, True])
def test_models_with_recurrent_state_have_pieces_by_default(
    keeps_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_platform(monkeypatch)
    assert mode_of(GraphConfig(), keeps_state) == ("full-and-piecewise" if keeps_state else "full")
    assert mode_of(GraphConfig(disable_cuda_graph=True), keeps_state) == "none"
    for mode in ("full", "none", "piecewise", "full-and-piecewise"):
        assert mode_of(GraphConfig(cuda_graph_mode=mode), keeps_state) == mode


def test_engines_that_share_experts_have_none_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_platform(monkeypatch)
    shared = ParallelConfig(dp_size=2, enable_dp_attention=True)
    assert mode_of(GraphConfig(), True, shared) == "full"


def test_a_cpu_has_none() -> None:
    assert mode_of(GraphConfig(), True) == "none"


class HostLengths(DeviceLengths):
    limits = replace(DeviceLengths.limits, graphs=False)


@pytest.mark.parametrize(
    "field", ["attention_backend", "decode_attention_backend", "draft_attention_backend"]
)
def test_backend_whose_limits_exclude_graphs_has_none(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_platform(monkeypatch)
    chosen: Any = {field: "fa"}
    config = EngineConfig(model=ModelConfig(model="x", device="cpu", **chosen))
    for kind in (HostLengths, DeviceLengths):
        monkeypatch.setitem(ATTENTION_BACKENDS, "fa", f"{kind.__module__}:{kind.__name__}")
        assert resolve(config, 2048, None).graph.disable_cuda_graph == (kind is HostLengths)


@pytest.mark.parametrize("is_there", [True, False])
def test_auto_has_graphs_where_triton_is_there(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the backend is torch, which no graph holds: capturing it would be an error."""
    use_fake_platform(monkeypatch)
    monkeypatch.setattr(FakePlatform, "attention_backend", None)
    monkeypatch.setattr(attention, "has_triton", lambda: is_there)
    monkeypatch.setattr(attention.flash_attention, "is_installed", lambda: False)
    config = EngineConfig(model=ModelConfig(model="x", device="cpu"))
    assert resolve(config, 2048, None).graph.disable_cuda_graph != is_there
    if not is_there:
        made = make_attention_backends(config.model, torch.device("cpu"))
        assert not made.target.limits.graphs


def test_limits_are_known_without_the_backend_s_packages() -> None:
    assert [name for name in ATTENTION_BACKENDS if not runs_in_graphs(name)] == ["torch"]
