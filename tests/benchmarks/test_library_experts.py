"""How experts are arranged for the libraries' kernels, which themselves need a GPU; what is right;
and what comes of a form that is missing or wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import expert_forms as forms
from benchmarks.kernels import library_experts as benched
from benchmarks.kernels import library_modules as modules
from benchmarks.kernels.experts import Shape
from specengine.kernels.experts.types import Activation, Chosen

SHAPE = Shape(256, 128, 4, 2)
BIASED = replace(SHAPE, has_bias=True, activation=Activation("clamped"))
SHAPES = {name: BIASED if name == "mxfp4" else SHAPE for name in forms.DRAWS}


def drawn_of(name: str) -> forms.Drawn:
    torch.manual_seed(0)
    return forms.draw(SHAPES[name], name, "cpu")


def chosen_of(rows: int) -> Chosen:
    return benched.choose(SHAPE, rows, rows, "cpu")


@pytest.mark.parametrize("name", forms.DRAWS)
def test_ours_gives_what_is_right(name: str) -> None:
    drawn, x = drawn_of(name), torch.randn(5, 256).bfloat16()
    made = benched.copied(forms.for_us(drawn))
    out = benched.summed(forms.US.run(x, chosen_of(5), made)).double()
    truth = benched.expected(x, chosen_of(5), drawn)
    assert float((out - truth).abs().max() / truth.abs().max()) < benched.most_error(name)


def test_what_is_right_sees_every_part_of_the_weights() -> None:
    drawn, x = drawn_of("mxfp4"), torch.randn(3, 256).bfloat16()
    truth = benched.expected(x, chosen_of(3), drawn)
    for name in ("gate_up", "down"):
        stack = getattr(drawn, name)
        assert stack.bias is not None
        for change in ({"bias": stack.bias + 1}, {"scale": stack.scale + 1}):
            other = replace(drawn, **{name: replace(stack, **change)})
            found = benched.expected(x, chosen_of(3), other)
            assert float((found - truth).abs().max() / truth.abs().max()) > 0.1


def test_grouped_product_gives_what_is_right() -> None:
    drawn, x = drawn_of("bf16"), torch.randn(9, 256).bfloat16()
    out = forms.grouped(x, chosen_of(9), forms.as_drawn(drawn)).double()
    truth = benched.expected(x, chosen_of(9), drawn)
    assert float((out - truth).abs().max() / truth.abs().max()) < benched.most_error("bf16")


@pytest.mark.parametrize("is_down", [False, True], ids=["gate_up", "down"])
def test_padding_adds_weights_of_zero(is_down: bool) -> None:
    drawn = drawn_of("mxfp4")
    stack = drawn.down if is_down else drawn.gate_up
    made, whole = forms.padded(stack, 64, 32, is_down), stack.dense(1)
    parts, rows = (1, 256) if is_down else (2, 128)
    wide = made.dense(1).view(parts, rows + (64 if is_down else 32), -1)
    columns = whole.shape[1]
    assert torch.equal(wide[:, :rows, :columns], whole.view(parts, rows, columns))
    assert not wide[:, rows:].any()
    assert not wide[:, :, columns:].any()
    assert made.bias is not None
    assert stack.bias is not None
    assert torch.equal(made.bias.view(4, parts, -1)[:, :, :rows].flatten(1), stack.bias)


def test_rows_of_gate_and_up_take_turns() -> None:
    stack = drawn_of("mxfp4").gate_up
    made, whole = forms.interleaved(stack), stack.dense(2)
    assert torch.equal(made.dense(2)[::2], whole[:128])
    assert torch.equal(made.dense(2)[1::2], whole[128:])
    assert made.bias is not None
    assert stack.bias is not None
    assert torch.equal(made.bias[:, 1::2], stack.bias[:, 128:])


def test_flashinfer_reads_up_before_gate() -> None:
    stack = drawn_of("fp8").gate_up
    made = forms.for_flashinfer(drawn_of("fp8"))
    whole = forms.Stack(made.weights[0], made.scales[0]).dense(3)
    assert torch.equal(whole, torch.cat(stack.dense(3).chunk(2)[::-1]))


def test_scales_of_a_byte_are_marlins_with_the_middle_of_four_turned() -> None:
    scale = torch.arange(64 * 3, dtype=torch.uint8).view(64, 3)  # 64 outputs
    found = forms.mx_scales(scale).view(torch.uint8)
    order = [first + 8 * then for first in range(8) for then in range(8)]
    for start in range(0, 64, 4):
        order[start + 1], order[start + 2] = order[start + 2], order[start + 1]
    assert torch.equal(found, scale.T[:, order])


def test_bits_are_of_the_chosen_experts() -> None:
    chosen = benched.choose(Shape(1, 1, 40, 5), 35, 0, "cpu")
    made = forms.as_bits(chosen, 40)
    words = made.bits.view(torch.int32).long()
    assert made.bits.stride() == (1, 64), "rows of a column stand side by side, filled up to 32"
    for row, ids in enumerate(chosen.ids_TK.tolist()):
        held = [n for n in range(64) if int(words[row, n // 32]) >> n % 32 & 1]
        assert held == sorted(ids)


class Clock:
    """In place of a graph: each call runs once and takes a microsecond more than the last."""

    def __init__(self) -> None:
        self.us = 0.0

    def __call__(self, calls: list[Any]) -> float:
        for call in calls:
            call()
        self.us += 1
        return self.us


def test_what_is_missing_or_wrong_is_said_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros_like(x)

    def missing(*_: Any) -> Any:
        raise ImportError("library is not installed")

    given = {
        forms.OURS: forms.US,
        "wrong": forms.Form(forms.as_drawn, wrong),
        "missing": forms.Form(missing, wrong),
        "fails": forms.Form(forms.as_drawn, missing),
    }
    monkeypatch.setattr(benched, "graph_us", Clock())
    bench = benched.Bench("tiny", "fp8", drawn_of("fp8"), (1, 3), "cpu")
    table, found = bench.measure(given)
    timed = [(one["form"], one["rows"]) for one in table]
    assert timed == [(name, rows) for name in (benched.NORM, forms.OURS) for rows in (1, 3)]
    assert all(one["us"] > 0 and one["shape"] == "tiny" for one in table)
    assert found["missing"] == found["fails"] == "ImportError: library is not installed"
    assert found["wrong"] == "error 1.0e+00"
    assert found[forms.OURS].startswith("error ")


@pytest.fixture
def no_package() -> Iterator[str]:
    yield "made_up_package"
    for name in [name for name in sys.modules if name.startswith("made_up_package")]:
        del sys.modules[name]


def test_a_file_runs_with_stubs_for_what_it_imports(tmp_path: Path, no_package: str) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(
        f"from {no_package}.deep import switch\nfrom .near import value\n"
        "def run():\n    from .near import value as late\n    return switch(), value, late\n"
    )
    modules.stub(f"{no_package}.deep", switch=lambda: "switch")
    modules.stub(f"{no_package}.layers.near", value=3)
    module = modules.run_file(f"{no_package}.layers.kernels", path)
    assert module.run() == ("switch", 3, 3)
    with pytest.raises(ImportError, match=r"missing\.py is missing"):
        modules.run_file(f"{no_package}.layers.missing", tmp_path / "missing.py")


def test_a_package_that_is_not_installed_is_said(no_package: str) -> None:
    with pytest.raises(ImportError, match=f"{no_package} is not installed"):
        modules.folder_of(no_package)
