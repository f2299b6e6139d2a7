"""The fused few-row kernels against the operations one after another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specengine.kernels.cuda import program
from specengine.kernels.linear import few_row, few_row_triton
from specengine.kernels.linear.activation import silu_and_mul
from specengine.kernels.linear.few_row import linear, linear_add, norm_gated_linear, norm_linear
from specengine.kernels.linear.fp8_linear import fp8_linear
from specengine.kernels.linear.norm import rms_norm
from specengine.kernels.linear.quantised import FP8, Fp8Input, Fp8Weight
from tests.kernels import half_precision
from tests.kernels.captured import assert_waits

EPS = 1e-5
HIDDEN, OUTS = 72, 40


def draw(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_norm_linear(device: torch.device, with_bias: bool) -> None:
    x, gain, weight = draw(device, 1, HIDDEN), draw(device, HIDDEN), draw(device, OUTS, HIDDEN)
    bias = draw(device, OUTS) if with_bias else None
    expected = F.linear(rms_norm(x, gain, EPS, backend="torch"), weight, bias)
    close(norm_linear(x, gain, EPS, weight, bias, backend="triton"), expected)
    close(norm_linear(x, gain, EPS, weight, bias, backend="torch"), expected)


def test_norm_gated_linear(device: torch.device) -> None:
    x, gain = draw(device, 1, HIDDEN), draw(device, HIDDEN)
    weight = draw(device, 2 * OUTS, HIDDEN)
    normed = rms_norm(x, gain, EPS, backend="torch")
    expected = silu_and_mul(F.linear(normed, weight), backend="torch")
    close(norm_gated_linear(x, gain, EPS, weight, backend="triton"), expected)
    close(norm_gated_linear(x, gain, EPS, weight, backend="torch"), expected)


def test_linear(device: torch.device) -> None:
    x, weight, bias = draw(device, 1, HIDDEN), draw(device, OUTS, HIDDEN), draw(device, OUTS)
    close(linear(x, weight, bias, backend="triton"), F.linear(x, weight, bias))
    close(linear(x, weight, backend="triton"), F.linear(x, weight))


def test_one_row_of_a_large_product_is_a_stream_of_weights(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_row, "MIN_STREAM", HIDDEN * OUTS)
    monkeypatch.setattr(few_row, "use_triton", lambda *_: True)
    taken = list[int]()
    streamed = few_row_triton.linear

    def counted(x: Tensor, weight: Tensor, *given: Tensor | None) -> Tensor:
        taken.append(len(weight))
        return streamed(x, weight, *given)

    monkeypatch.setattr(few_row_triton, "linear", counted)
    weight = draw(device, OUTS, HIDDEN)
    for rows, outs in ((1, OUTS), (2, OUTS), (1, OUTS - 1)):
        x = draw(device, rows, HIDDEN)
        close(linear(x, weight[:outs]), F.linear(x, weight[:outs]))
    assert taken == [OUTS]


def test_linear_add(device: torch.device) -> None:
    x, weight = draw(device, 1, HIDDEN), draw(device, OUTS, HIDDEN)
    residual = draw(device, 1, OUTS)
    before = residual.clone()
    close(linear_add(x, weight, residual, backend="triton"), F.linear(x, weight) + residual)
    close(linear_add(x, weight, residual, backend="torch"), F.linear(x, weight) + residual)
    bias = draw(device, OUTS)
    found = linear_add(x, weight, residual, bias, backend="triton")
    close(found, F.linear(x, weight, bias) + residual)
    assert torch.equal(residual, before)


def test_float_logits_from_half_rows(device: torch.device) -> None:
    x = draw(device, 1, HIDDEN).half()
    gain, weight = draw(device, HIDDEN).half(), draw(device, OUTS, HIDDEN).half()
    out = norm_linear(x, gain, EPS, weight, out_dtype=torch.float32, backend="triton")
    assert out.dtype is torch.float32
    expected = rms_norm(x, gain, EPS, backend="torch").float() @ weight.float().T
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


class TestCuda:
    """The CUDA C++ kernels: several rows, in half precision."""

    pytestmark = pytest.mark.gpu

    @pytest.fixture(autouse=True)
    def _needs_cuda(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        if not program.available():
            pytest.skip("cuda-bindings is not installed")

    @pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype:
        assert isinstance(request.param, torch.dtype)
        return request.param

    def draw(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    @pytest.mark.parametrize("hidden", [72, 576, 2048, 5000])
    @pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 128])
    def test_every_operation(self, rows: int, hidden: int, dtype: torch.dtype) -> None:
        outs = 104
        x, gain = self.draw(dtype, rows, hidden), self.draw(dtype, hidden)
        weight = self.draw(dtype, 2 * outs, hidden) * hidden**-0.5
        bias, residual = self.draw(dtype, 2 * outs), self.draw(dtype, rows, 2 * outs)
        for given in (None, bias):
            half_precision.close(
                norm_linear(x, gain, EPS, weight, given, backend="cuda"),
                norm_linear(x, gain, EPS, weight, given, backend="torch"),
            )
        half_precision.close(
            norm_gated_linear(x, gain, EPS, weight, backend="cuda"),
            norm_gated_linear(x, gain, EPS, weight, backend="torch"),
        )
        for given in (None, bias):
            half_precision.close(
                linear_add(x, weight, residual, given, backend="cuda"),
                linear_add(x, weight, residual, given, backend="torch"),
            )

    def test_linear(self, dtype: torch.dtype) -> None:
        x, weight, bias = self.draw(dtype, 5, 72), self.draw(dtype, 40, 72), self.draw(dtype, 40)
        half_precision.close(linear(x, weight, bias, backend="cuda"), F.linear(x, weight, bias))

    def test_float_results(self, dtype: torch.dtype) -> None:
        x, gain, weight = self.draw(dtype, 2, 72), self.draw(dtype, 72), self.draw(dtype, 40, 72)
        out = norm_linear(x, gain, EPS, weight, out_dtype=torch.float32, backend="cuda")
        assert out.dtype is torch.float32
        half_precision.close(out, norm_linear(x, gain, EPS, weight, backend="torch"))

    def test_rows_of_a_wider_tensor(self, dtype: torch.dtype) -> None:
        x = self.draw(dtype, 3, 80)[:, 8:]
        weight, residual = self.draw(dtype, 40, 72), self.draw(dtype, 3, 40)
        before = residual.clone()
        half_precision.close(
            linear_add(x, weight, residual, backend="cuda"),
            linear_add(x, weight, residual, backend="torch"),
        )
        assert torch.equal(residual, before)

    @pytest.mark.parametrize("group", [None, 128], ids=["by row", "in blocks"])
    @pytest.mark.parametrize("rows", [1, 8, 64, 128])
    def test_what_runs_beside_a_product_ends_behind_it(
        self, rows: int, group: int | None, dtype: torch.dtype
    ) -> None:
        """Between a kernel that lets the next start at once and one that starts at once."""
        large, small = self.draw(dtype, 6144, 2048), self.draw(dtype, 64, 2048)
        codes = large.to(FP8)
        scale = torch.ones(48, 16, device="cuda")
        weight = Fp8Weight(codes, scale, 128, 128, Fp8Input(group=128))
        if group is None:
            weight = Fp8Weight.of(large)

        def run(x: Tensor) -> tuple[Tensor, ...]:
            room = x.new_empty(len(x), 64)
            product = fp8_linear(x, weight)
            found = linear(x, small, into=room, backend="cuda")
            assert found is room
            return product, found, linear(found, small[:, :64].contiguous(), backend="cuda")

        x = self.draw(dtype, rows, 2048)
        assert torch.equal(run(x)[1], linear(x, small, backend="cuda"))
        assert_waits(x, run)

    def test_a_row_does_not_depend_on_its_neighbours(self, dtype: torch.dtype) -> None:
        x, gain = self.draw(dtype, 128, 576), self.draw(dtype, 576)
        weight = self.draw(dtype, 3072, 576)
        whole = norm_gated_linear(x, gain, EPS, weight, backend="cuda")
        for rows in (1, 4, 16, 33, 64):
            part = norm_gated_linear(x[:rows], gain, EPS, weight, backend="cuda")
            assert torch.equal(part, whole[:rows])


@pytest.mark.parametrize(
    ("hidden", "num_weights", "most"), [(576, 3_538_944, 128), (960, 9_830_400, 50), (4096, 1, 1)]
)
def test_few_rows_are_few_where_weights_are_many(
    hidden: int, num_weights: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_row, "_has_tiles", lambda x: True)
    monkeypatch.setattr(few_row, "use_triton", lambda *_: True)
    fitting = [
        rows for rows in range(1, 300) if few_row.fits(torch.empty(rows, hidden), num_weights)
    ]
    assert fitting == list(range(1, most + 1))
