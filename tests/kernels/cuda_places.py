"""Where tests of CUDA C++ kernels run: emulated on a CPU, and on a card."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from specengine.kernels.cuda import program

PLACES = [
    pytest.param("cpu", id="emulated"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


def placed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernels: ModuleType
) -> torch.device:
    """For a fixture with PLACES as parameters: kernels, a module that has `compiled`, are emulated
    on the CPU; without a card, or without what compiles for it, the test is skipped."""
    torch.manual_seed(0)
    if request.param == "cpu":
        monkeypatch.setattr(kernels, "compiled", request.getfixturevalue("emulated"))
    elif not torch.cuda.is_available() or not program.available():
        pytest.skip("no CUDA device, or cuda-bindings is not installed")
    return torch.device(request.param)
