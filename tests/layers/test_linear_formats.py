"""Types of weight that nothing but an entry of LINEAR_FORMATS names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specengine.core.errors import ModelLoadError
from specengine.core.registry import LINEAR_FORMATS
from specengine.kernels.linear.linear_format import LinearFormat
from specengine.kernels.linear.quantised import Fp8Input
from specengine.layers.linear import MergedLinear, deferred_weights
from specengine.layers.quantization import linears
from specengine.layers.quantization.linears import QuantisedLinear, close_linears, open_linears
from specengine.layers.quantization.method import ROW_ORDER, LayerTensors, Quantization
from specengine.layers.quantization.parts import format_of

FORM = Fp8Input()


@dataclass(frozen=True)
class Eighths:
    """w = codes / 8."""

    codes: Tensor  # int8 [N, K]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.numel()

    def dequantised(self) -> Tensor:
        return self.codes.float() / 8

    def narrow(self, dim: int, start: int, size: int) -> Eighths:
        return Eighths(self.codes.narrow(dim, start, size))


class OfExperts(Eighths):
    pass


def join(weights: Sequence[Eighths]) -> Eighths:
    return Eighths(torch.cat([one.codes for one in weights]))


def multiply(x: Tensor, weight: Eighths, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.dequantised(), bias)


FORMAT = LinearFormat(
    Eighths,
    "eighths",
    join=join,
    multiply=multiply,
    parts=lambda x, weight: multiply(x, weight, None)[None],
    gated=lambda x, weight, activation, bias: x,
    input=lambda weight: FORM,
    waits=lambda weight: True,
    completes_input=True,
)
OF_EXPERTS = LinearFormat(OfExperts, "eighths of experts")


@dataclass
class InEighths(Quantization):
    kind: type[Eighths] = Eighths

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> InEighths:
        return cls()

    def read(self, layer: LayerTensors) -> Eighths:
        return self.kind(layer.shaped("codes", layer.rows, layer.columns))

    def random(self, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"codes": torch.randint(-9, 9, (rows, columns), dtype=torch.int8)}


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> MergedLinear:
    """A layer of two products whose tensors were collected."""
    monkeypatch.setattr(linears, "wants_dense", lambda device: False)
    with deferred_weights():
        made = MergedLinear(4, [2, 3])
    open_linears(made)
    linears.fill_linears(made, InEighths(), seed=0)
    return made


def test_registered_weight_is_joined_and_multiplied(
    layer: MergedLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LINEAR_FORMATS, "eighths", f"{__name__}:FORMAT")
    assert layer.incoming is not None
    codes = torch.cat([part.tensors["codes"] for part in layer.incoming])
    close_linears(layer, InEighths(), torch.float32)
    x, kernel = torch.randn(3, 4), layer.kernel
    assert isinstance(kernel, QuantisedLinear)
    assert len(kernel.parts) == 1
    expected = x @ (codes.float() / 8).T
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.parts(x), expected[None])
    assert (kernel.takes, kernel.waits, kernel.completes_input) == (FORM, True, True)
    assert kernel.gated is not None
    several = QuantisedLinear([kernel.parts[0], torch.ones(2, 4)], None)
    torch.testing.assert_close(several(x)[:, :5], expected)
    assert (several.takes, several.gated, several.parts_of(x)) == (None, None, None)
    assert not several.waits
    assert not several.completes_input


def test_weight_that_only_experts_multiply_with_is_refused_by_its_title(
    layer: MergedLinear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LINEAR_FORMATS, "of_experts", f"{__name__}:OF_EXPERTS")
    with pytest.raises(ModelLoadError, match="in eighths of experts, of which experts alone"):
        close_linears(layer, InEighths(OfExperts), torch.float32)
    linears.fill_linears(layer, InEighths(), seed=0)
    assert layer.incoming is not None
    layer.incoming[0].tensors[ROW_ORDER] = torch.tensor([1, 0])
    with pytest.raises(ModelLoadError, match="is eighths of experts, whose rows are not reorder"):
        close_linears(layer, InEighths(OfExperts), torch.float32)


def test_weight_of_no_entry_is_an_error_that_names_the_table() -> None:
    with pytest.raises(TypeError, match=r"LINEAR_FORMATS .* holds int; add one"):
        format_of(1)  # type: ignore[arg-type]
