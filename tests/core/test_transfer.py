"""What is sent to a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specengine.core.transfer import pinned, sent
from tests.device import DEVICE

CPU = torch.device("cpu")


def test_where_the_device_is_the_host_nothing_is_copied() -> None:
    values = torch.arange(5)
    assert pinned(values, CPU) is values
    assert sent(values, CPU) is values


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda values: values,
    "expanded": lambda values: values.expand(3, -1),
    "some columns": lambda values: values.view(2, 2000)[:, 1:],
    "transposed": lambda values: values.view(40, 100).T,
}


def pin_memory(values: Tensor) -> Tensor:
    """As PyTorch does: strides are kept."""
    return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype).copy_(values)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_it_is_contiguous(
    view: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of anything else to a GPU goes through pageable memory, and waits."""
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    values = view(torch.arange(4000))
    for device in (CPU, torch.device("cuda")):
        found = pinned(values, device)
        assert found.is_contiguous()
        assert torch.equal(found, values)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_it_may_change_once_it_is_sent(view: Callable[[Tensor], Tensor]) -> None:
    """Also while the device is behind."""
    square, values = torch.ones(4096, 4096, device=DEVICE), torch.arange(4000)
    expected = view(values).clone()
    for _ in range(20):
        square = square @ square * 1e-4
    found = sent(view(values), DEVICE)
    values.zero_()
    assert torch.equal(found.cpu(), expected)
    assert sent(found, DEVICE) is found
