"""Experts of quantised checkpoints that stay in their format, as on a GPU: what ranks have of them,
what is refused, and what becomes dense all the same. Products are the reference's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from specengine.core.errors import ConfigError
from specengine.kernels.experts.packed import PackedExperts
from specengine.kernels.experts.types import Chosen
from specengine.layers.experts import Experts
from specengine.layers.in_place import check_alike, put_weights
from specengine.layers.layer_spec import ExpertsSpec
from specengine.layers.linear import deferred_weights
from specengine.layers.quantization import experts as quantised_experts
from specengine.layers.quantization import linears
from specengine.layers.quantization.fp8 import Fp8WhileLoading
from specengine.layers.quantization.linears import close_linears, fill_linears, open_linears
from specengine.layers.quantization.method import Quantization
from specengine.layers.weights import fill_places, weight_places
from tests.layers.test_quantization import fields_of
from tests.support.pretended_ranks import on_threads
from tests.support.quantised import FORMATS, Format

HIDDEN, INNER, COUNT = 64, 256, 3
SPEC = ExpertsSpec(num_experts=COUNT, num_chosen=2, intermediate_size=INNER)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)


@dataclass
class Checkpoint:
    tensors: dict[str, Tensor]
    dense: dict[str, Tensor]


def checkpoint(form: Format, seed: int = 0, plain: tuple[str, ...] = ()) -> Checkpoint:
    """plain: experts' names that the quantisation left out."""
    generator = torch.Generator().manual_seed(seed)
    made = Checkpoint({}, {})
    for expert in range(COUNT):
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = (HIDDEN, INNER) if name == "down_proj" else (INNER, HIDDEN)
            weight = 0.1 * torch.randn(shape, generator=generator)
            start = f"mlp.experts.{expert}.{name}"
            packed = form.pack(weight)
            if f"{expert}.{name}" in plain:
                made.tensors[f"{start}.weight"] = packed.dense
            else:
                made.tensors |= {f"{start}.{leaf}": one for leaf, one in packed.tensors.items()}
            made.dense[f"{start}.weight"] = packed.dense
    return made


def empty() -> nn.Module:
    with deferred_weights():
        model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Experts(HIDDEN, SPEC)})})
    open_linears(model)
    return model


def experts_of(model: nn.Module) -> Experts:
    found: Experts = model["mlp"]["experts"]  # type: ignore[index]
    return found


def read(method: Quantization, tensors: dict[str, Tensor]) -> Experts:
    model = empty()
    fill_places(weight_places(model, {}), tensors.items(), "test")
    close_linears(model, method, torch.float32)
    return experts_of(model)


def method_of(form: Format) -> Quantization:
    return linears.make_quantization(fields_of(form))


def rows() -> tuple[Tensor, Chosen]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]], dtype=torch.int32)
    x = torch.randn(4, HIDDEN, generator=generator)
    return x, Chosen(ids, torch.rand(4, 2, generator=generator))


def run(experts: Experts) -> Tensor:
    out: Tensor = experts(*rows())
    return out


def dense_output(held: Checkpoint) -> Tensor:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": Experts(HIDDEN, SPEC)})})
    fill_places(weight_places(model, {}), held.dense.items(), "test")
    return run(experts_of(model))


@pytest.mark.parametrize("name", ["fp8 blocks", "gptq"])
def test_how_many_experts_come_at_once_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = checkpoint(FORMATS[name])
    expected = run(read(method_of(FORMATS[name]), held.tensors))
    monkeypatch.setattr(quantised_experts, "_BYTES_AHEAD", 1)
    assert torch.equal(run(read(method_of(FORMATS[name]), held.tensors)), expected)


@pytest.mark.parametrize("name", list(FORMATS))
def test_each_format_stays_what_it_is(name: str) -> None:
    form = FORMATS[name]
    held = checkpoint(form)
    experts = read(method_of(form), held.tensors)
    assert experts.packed is not None
    assert experts.gate_up is None
    for expert in range(COUNT):
        start = f"mlp.experts.{expert}."
        halves = [held.dense[f"{start}{one}_proj.weight"] for one in ("gate", "up")]
        gate_up, down = experts.packed.gate_up, experts.packed.down
        torch.testing.assert_close(gate_up.one(expert).dequantised(), torch.cat(halves))
        torch.testing.assert_close(
            down.one(expert).dequantised(), held.dense[f"{start}down_proj.weight"]
        )
    if "fp8" not in name and "modelopt" not in name:  # whose inputs are rounded
        torch.testing.assert_close(run(experts), dense_output(held), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name", ["fp8 blocks", "awq", "gptq of 8 bits", "compressed w4a16 asymmetric"]
)
def test_ranks_give_parts_of_the_sum(name: str, size: int) -> None:
    form = FORMATS[name]
    held = checkpoint(form)

    def part() -> tuple[Tensor, int]:
        experts = read(method_of(form), held.tensors)
        assert experts.packed is not None
        return run(experts), experts.packed.gate_up.num_bytes

    ((whole, num_bytes),) = on_threads(1, part)
    found = on_threads(size, part)
    torch.testing.assert_close(sum(one for one, _ in found), whole, rtol=1e-4, atol=1e-4)
    assert sum(count for _, count in found) == num_bytes


def test_groups_that_ranks_would_cut_are_refused() -> None:
    form = FORMATS["fp8 blocks of 128"]
    tensors = checkpoint(form).tensors
    with pytest.raises(ConfigError, match=r"inputs .* of .*down_proj begin or end amid a group"):
        on_threads(4, lambda: read(method_of(form), tensors))


def test_experts_of_which_some_are_dense_become_dense() -> None:
    form = FORMATS["compressed w4a16"]
    held = checkpoint(form, plain=("1.down_proj",))
    experts = read(method_of(form), held.tensors)
    assert experts.packed is None
    torch.testing.assert_close(run(experts), dense_output(held))


def test_gate_and_up_in_other_orders_become_dense() -> None:
    form = FORMATS["gptq act-order"]
    held = checkpoint(form)
    name = "mlp.experts.0.up_proj.g_idx"
    held.tensors[name] = held.tensors[name].flip(0)
    assert read(method_of(form), held.tensors).packed is None


def test_plain_experts_are_quantised_while_they_are_loaded() -> None:
    held = checkpoint(FORMATS["fp8 tensor"])
    experts = read(Fp8WhileLoading.from_fields({}), held.dense)
    assert experts.packed is not None
    assert experts.packed.gate_up.tensors["codes"].dtype == torch.float8_e4m3fn
    expected = dense_output(held)
    assert float((run(experts) - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("name", ["fp8 blocks of 128", "awq", "compressed w4a16"])
def test_random_weights_are_drawn_in_the_format(name: str) -> None:
    def packed(size: int) -> list[PackedExperts]:
        def draw() -> PackedExperts:
            model = empty()
            fill_linears(model, method_of(FORMATS[name]), 5)
            close_linears(model, method_of(FORMATS[name]), torch.float32)
            found = experts_of(model).packed
            assert found is not None
            return found.down

        return on_threads(size, draw)

    (whole,) = packed(1)
    assert 0.01 < float(whole.one(0).dequantised().std()) < 0.05
    assert not torch.equal(whole.one(0).codes, whole.one(1).codes)
    halves = [one.one(2).dequantised() for one in packed(2)]
    assert torch.equal(torch.cat(halves, dim=1), whole.one(2).dequantised())


def test_new_weights_take_the_place_of_packed_ones() -> None:
    form = FORMATS["awq"]
    old, new = (read(method_of(form), checkpoint(form, seed).tensors) for seed in (1, 2))
    expected = run(new)
    assert not torch.allclose(run(old), expected)
    check_alike(old, new)
    put_weights(old, new)
    assert torch.equal(run(old), expected)
