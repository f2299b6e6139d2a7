"""Where the Triton kernels run: on a GPU, or in Triton's interpreter on CPU tensors."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

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
