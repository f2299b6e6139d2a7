"""Which of two kernels a forward takes, and that either gives dense attention: on any machine over
FlashAttention's function in PyTorch, on a GPU over the kernels of whichever library is there."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from specengine.core.batch import ForwardMode
from specengine.kernels.attention import flash_attention, flash_attention_ref
from specengine.kernels.precompile import precompile
from specengine.runner.attention import make_attention_backend, mixed_backend
from specengine.runner.attention.flash_backend import FlashPlan
from specengine.runner.attention.mixed_backend import MixedAttentionBackend
from tests.device import DEVICE
from tests.runner.attention_cases import BUSHY, Case, Layer, run

HAS_LIBRARY = DEVICE.type == "cuda" and flash_attention.is_installed()
LONG = Case([(13, 20), (0, 9)], layer=Layer(8, 2, 64), dtype=torch.float16, device=DEVICE)
OTHERS = {
    "short prompts": replace(LONG, lens=[(3, 5)]),
    "decoding": replace(LONG, lens=[(40, 1), (9, 1)], mode=ForwardMode.DECODE),
    "a tree": replace(LONG, lens=[(40, 7)], mode=ForwardMode.TARGET_VERIFY, trees=[BUSHY]),
    "float32": replace(LONG, dtype=torch.float32),
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MixedAttentionBackend:
    monkeypatch.setattr(mixed_backend, "_LEAST_WORK", 20 * 33)
    flash = flash_attention.load() if HAS_LIBRARY else flash_attention_ref.flash_attention
    return MixedAttentionBackend(DEVICE, flash)


def test_long_prompts_take_flash_attention(backend: MixedAttentionBackend) -> None:
    assert isinstance(backend.init_forward_metadata(LONG.batch(backend)).metadata, FlashPlan)
    out, expected = run(LONG, backend)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_takes_our_own(name: str, backend: MixedAttentionBackend) -> None:
    case = OTHERS[name]
    plan = backend.init_forward_metadata(case.batch(backend))
    assert not isinstance(plan.metadata, FlashPlan)
    out, expected = run(case, backend)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_graphs_take_our_own(backend: MixedAttentionBackend) -> None:
    plan = backend.init_forward_metadata_capture(LONG.batch(backend))
    assert not isinstance(plan.metadata, FlashPlan)


def test_graphs_of_wide_prompts_take_flash_attention_for_the_whole_context(
    backend: MixedAttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_backend, "_LEAST_CAPTURED", 20)
    batch = LONG.batch(backend)
    plan = backend.init_forward_metadata_capture(batch).metadata
    assert isinstance(plan, FlashPlan)
    assert plan.max_keys == batch.req_to_token_pool.req_to_token.shape[1]


@pytest.mark.parametrize("plan", ["init_forward_metadata", "init_forward_metadata_capture"])
def test_flash_attention_is_not_called_while_kernels_are_compiled(
    plan: str, backend: MixedAttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_backend, "_LEAST_CAPTURED", 20)
    monkeypatch.setattr(backend.flash, "flash", lambda *_: pytest.fail("called"))
    batch, q = LONG.batch(backend), LONG.q()
    with precompile():
        assert isinstance(getattr(backend, plan)(batch).metadata, FlashPlan)
        out = backend.forward_extend(q, LONG.layer, batch)
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
    assert not out.any()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no CUDA device: auto is torch")
class TestAuto:
    def test_it_takes_flash_attention_where_there_is_one(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(flash_attention, "is_installed", lambda: True)
        monkeypatch.setattr(flash_attention, "load", lambda: flash_attention_ref.flash_attention)
        with caplog.at_level(logging.INFO):
            assert isinstance(make_attention_backend("auto", DEVICE), MixedAttentionBackend)
        assert "fa for long prompts" in caplog.text

    def test_a_library_of_another_pytorch_is_left_alone(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> None:
            raise ImportError("undefined symbol")

        monkeypatch.setattr(flash_attention, "is_installed", lambda: True)
        monkeypatch.setattr(flash_attention, "load", fail)
        assert not isinstance(make_attention_backend("auto", DEVICE), MixedAttentionBackend)
        assert "undefined symbol" in caplog.text
