from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specengine.core.errors import OutOfMemoryError
from specengine.runner.device_memory import DeviceMemory
from specengine.runner.memory_plan import GIB, MemoryPlan

PLAN = MemoryPlan(
    total=16 * GIB,
    fraction=0.5,
    used=2 * GIB,
    peak=3 * GIB,
    current=2 * GIB,
    bytes_per_token=1 << 20,
    limit_tokens=1 << 30,
    page_size=16,
)


def test_the_formula() -> None:
    """16 x 0.5 - 2 used - 3 peak + 2 current = 5 GiB."""
    assert PLAN.kv_budget == 5 * GIB
    assert PLAN.num_tokens == 5 * 1024


def test_whole_pages_and_the_limit() -> None:
    assert replace(PLAN, limit_tokens=1000).num_tokens == 992
    assert replace(PLAN, used=9 * GIB).num_tokens == 0


def test_enough_is_enough() -> None:
    PLAN.check(5 * 1024)


def test_the_error_names_a_fraction_that_fits() -> None:
    with pytest.raises(OutOfMemoryError, match=r"--mem-fraction-static 0\.\d+ fits") as error:
        PLAN.check(6 * 1024)
    words = str(error.value).split()
    fraction = float(words[words.index("--mem-fraction-static") + 1])
    replace(PLAN, fraction=fraction).check(6 * 1024)


def test_the_error_names_a_context_that_fits() -> None:
    with pytest.raises(OutOfMemoryError, match="--context-length 5120 fits"):
        PLAN.check(100 * 1024)


def test_weights_alone_too_large() -> None:
    with pytest.raises(OutOfMemoryError, match="weights alone"):
        replace(PLAN, used=15 * GIB, fraction=0.9).check(100 * 1024)


def test_readings_of_this_machine() -> None:
    memory = DeviceMemory(torch.device("cpu"))
    assert 0 < memory.used() < memory.total()
    assert memory.peak() >= memory.current() > 0
