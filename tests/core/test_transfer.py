"""What is sent to a device."""

from __future__ import annotations

import pytest
import torch

from specengine.core.transfer import pinned, sent
from tests.device import DEVICE

CPU = torch.device("cpu")


def test_where_the_device_is_the_host_nothing_is_copied() -> None:
    values = torch.arange(5)
    assert pinned(values, CPU) is values
    assert sent(values, CPU) is values


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="no CUDA device")
def test_it_may_change_once_it_is_sent() -> None:
    """Also while the device is behind, and where it is no contiguous tensor."""
    square = torch.ones(4096, 4096, device=DEVICE)
    for values in (torch.arange(4000), torch.arange(4000).view(2, 2000)[:, 1:]):
        expected = values.clone()
        for _ in range(20):
            square = square @ square * 1e-4
        found = sent(values, DEVICE)
        values.zero_()
        assert torch.equal(found.cpu(), expected)
        assert sent(found, DEVICE) is found
