"""Where the Triton kernels run: on a GPU, or in Triton's interpreter on CPU tensors."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from specengine.kernels.dispatch import Backend
from tests.conftest import CacheFolder
from tests.kernels.emulated_rows import emulate_rows

HAS_CUDA = torch.cuda.is_available()


def _require_interpreter() -> None:
    import triton.language as tl

    if type(tl.sum).__name__ != "InterpretedFunction":
        pytest.fail("triton was imported before TRITON_INTERPRET=1 was set; set it for the run")


@pytest.fixture(
    params=[
        pytest.param("interpreter", id="interpreter"),
        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if request.param == "cuda":
        if not HAS_CUDA:
            pytest.skip("no CUDA device")
        return torch.device("cuda")
    if HAS_CUDA:
        pytest.skip("the interpreter is tested where there is no CUDA device")
    _require_interpreter()
    return torch.device("cpu")


@pytest.fixture(params=["triton", "cuda"])
def row_backend(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Backend:
    """Backends of operations that have a kernel in either; on a CPU both are emulated."""
    if request.param == "cuda" and device.type == "cpu":
        emulate_rows(request.getfixturevalue("emulated"), monkeypatch)
    backend: Backend = request.param
    return backend


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def triton_cache(cache_folder: CacheFolder) -> Path:
    """Kept from run to run: Triton compiles a kernel again when its source or the compiler is
    another."""
    return cache_folder("triton")
