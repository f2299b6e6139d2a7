"""What stands in for a peer's layers where its EAGLE-3 model is compared with this engine's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.lab.test_peer_benches import PEERS, load


@pytest.fixture
def hollow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(PEERS), *sys.path])
    yield load("hollow")
    for name in ("hollow", "plain_layers"):
        sys.modules.pop(name, None)


SOURCE = """
from pretend.layers import Norm, Unknown
from pretend.config import Settings, setting
from .beside import doubled

class Model(Norm):
    kind = Settings.FAST.inner
    def forward(self, x: Unknown | None = None):
        setting("anything", at=1).all()
        return doubled(self.size + x)
"""


def test_one_source_file_runs_without_its_package(hollow: Any, tmp_path: Path) -> None:
    folder = tmp_path / "pretend" / "models"
    folder.mkdir(parents=True)
    (folder / "draft.py").write_text(SOURCE)
    (folder / "beside.py").write_text("def doubled(x):\n    return 2 * x\n")
    norm = type("Norm", (), {"size": 3})
    names = ("pretend.models.draft", "pretend.models.beside")
    with hollow.peer_modules(hollow.PeerFinder(tmp_path, names, {"Norm": norm})):
        module: Any = importlib.import_module(names[0])
        model: Any = module.Model()
        assert model.forward(4) == 14
        assert isinstance(model, norm)
    assert not [name for name in sys.modules if name.startswith("pretend")]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pretend")


def test_plain_layers(hollow: Any) -> None:
    layers = load("plain_layers")
    torch.manual_seed(0)
    config = SimpleNamespace(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_theta": 1e4},
    )
    attention = layers.LlamaAttention(config)
    joined = layers.QKVParallelLinear(16, 8, 4, 2, bias=False)
    shards = {"q": torch.randn(32, 16), "k": torch.randn(16, 16), "v": torch.randn(16, 16)}
    for name, one in shards.items():
        joined.weight.weight_loader(joined.weight, one, name)
    attention.qkv_proj = joined
    x, rows = torch.randn(5, 16), torch.arange(5)
    q, k, v = (F.linear(x, one).view(5, -1, 8) for one in shards.values())
    q, k = attention._rotate(q, rows), attention._rotate(k, rows)
    q, k, v = (one.transpose(0, 1) for one in (q, k, v))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = attention.o_proj(whole.transpose(0, 1).flatten(1))
    assert torch.allclose(attention(positions=rows, hidden_states=x), expected, atol=1e-5)
    attention.keep(3)
    again = attention(positions=rows[3:], hidden_states=x[3:])
    assert torch.allclose(again, expected[3:], atol=1e-5), "rows that were kept are seen again"
    norm, own = layers.RMSNorm(16, eps=1e-5), nn.RMSNorm(16, eps=1e-5)
    normed, total = norm(x, x)
    assert torch.equal(total, 2 * x)
    assert torch.allclose(normed, own(2 * x), atol=1e-6)
