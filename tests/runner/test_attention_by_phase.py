"""One backend for prompts and another for rounds: which serves which mode, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specengine import LLM, SamplingParams, SpecConfig
from specengine.core.batch import AttentionBackend, ForwardMode
from specengine.core.config import ModelConfig
from specengine.core.errors import ConfigError
from specengine.core.interfaces import AttentionLimits
from specengine.kernels.attention import flash_attention
from specengine.runner import attention
from specengine.runner.attention import make_attention_backends
from specengine.runner.attention.by_phase import PhasedAttentionBackend
from specengine.runner.attention.limits import check_layers, check_trees
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from tests.runner.attention_cases import Case, Layer, run

CPU = torch.device("cpu")
PREFILL = {ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL}


def named(name: str, limits: AttentionLimits | None = None) -> TorchAttentionBackend:
    backend = TorchAttentionBackend()
    backend.name = name
    backend.limits = limits or backend.limits
    return backend


@pytest.fixture
def phased() -> PhasedAttentionBackend:
    return PhasedAttentionBackend(named("long"), named("short"))


@pytest.mark.parametrize("mode", ForwardMode)
def test_prompts_take_one_backend_and_rounds_the_other(
    mode: ForwardMode, phased: PhasedAttentionBackend
) -> None:
    assert phased.for_mode(mode).name == ("long" if mode in PREFILL else "short")


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY])
def test_plan_fits_its_batch_and_gives_dense_attention(
    mode: ForwardMode, phased: PhasedAttentionBackend
) -> None:
    out, expected = run(Case([(5, 3), (0, 4)], mode=mode), phased)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_layer_that_either_lacks_is_refused_by_its_name() -> None:
    strict = AttentionLimits(head_dims=frozenset({64}))
    layers = [Layer(4, 2, 48)]
    for backend in (
        PhasedAttentionBackend(named("long", strict), named("short")),
        PhasedAttentionBackend(named("long"), named("short", strict)),
    ):
        which = "long" if backend.prefill.limits is strict else "short"
        with pytest.raises(ConfigError, match=f"backend {which} has no kernels for heads of 48"):
            check_layers(backend, layers, torch.float32)


def test_trees_ask_the_backend_of_rounds() -> None:
    layers = [replace(Layer(4, 2, 64), sliding_window=8)]
    strict = AttentionLimits(windows_under_trees=False)
    check_trees(PhasedAttentionBackend(named("long", strict), named("short")), layers)
    with pytest.raises(ConfigError, match="backend short has no sliding window"):
        check_trees(PhasedAttentionBackend(named("long"), named("short", strict)), layers)


def test_names_are_of_prompts_rounds_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "make_attention_backend", lambda name, device: named(name))
    one = make_attention_backends(ModelConfig(model="m", attention_backend="torch"), CPU)
    assert one.names == "torch"
    assert one.draft is one.target
    model = ModelConfig(
        model="m",
        attention_backend="triton",
        prefill_attention_backend="fa",
        draft_attention_backend="torch",
    )
    several = make_attention_backends(model, CPU)
    assert several.names == "fa for prompts, triton for rounds, torch for drafts"


@pytest.mark.parametrize("phase", ["", "prefill_", "decode_", "draft_"])
def test_refused_backend_is_named_by_its_flag(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "is_installed", lambda: True)
    model = ModelConfig(model="m", **{f"{phase}attention_backend": "fa"})
    flag = f"--{phase}attention-backend".replace("_", "-")
    with pytest.raises(
        ConfigError, match=f"^{flag} fa: fa needs a CUDA device; use torch on a CPU"
    ):
        make_attention_backends(model, CPU)


class Counting(TorchAttentionBackend):
    def __init__(self) -> None:
        self.modes: set[ForwardMode] = set()

    def init_forward_metadata(self, batch):  # type: ignore[no-untyped-def]
        self.modes.add(batch.forward_mode)
        return super().init_forward_metadata(batch)


def test_engine_on_three_backends_answers_as_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Counting] = {}

    def make(name: str, device: torch.device) -> AttentionBackend:
        return made.setdefault(name, Counting())

    spec = SpecConfig(algorithm="EAGLE3", num_steps=3, adaptive=False)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    flags = {"dtype": "float32", "device": "cpu", "max_total_tokens": 1024}
    expected = LLM("tiny", spec, **flags).generate(["Hello! Who are you?"], params)
    monkeypatch.setattr(attention, "make_attention_backend", make)
    llm = LLM(
        "tiny",
        spec,
        **flags,
        prefill_attention_backend="fa",
        decode_attention_backend="triton",
        draft_attention_backend="flashinfer",
    )
    assert llm.generate(["Hello! Who are you?"], params)[0].token_ids == expected[0].token_ids
    assert made["fa"].modes == {ForwardMode.EXTEND}
    assert ForwardMode.TARGET_VERIFY in made["triton"].modes
    assert not made["triton"].modes & PREFILL
    assert made["flashinfer"].modes
