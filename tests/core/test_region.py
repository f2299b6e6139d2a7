"""Host memory that is given back comes back at the same addresses, with the same contents."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from specengine.core.errors import ConfigError
from specengine.core.platforms.cpu import HostMemory
from specengine.core.platforms.cpu_region import HostRegion

MANY = 48 << 20  # bytes
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages go as Linux does it")


def test_memory_is_given_back_and_comes_back() -> None:
    kept = torch.arange(MANY // 8)
    gone = torch.ones(MANY, dtype=torch.uint8)
    small, view = torch.arange(5), kept[10:100]
    region, memory = HostRegion(), HostMemory()
    region.find = lambda: iter([kept, view, gone, small])
    addresses = [one.data_ptr() for one in (kept, gone, small)]
    before = memory.used()
    num_bytes = region.release([gone])
    assert 2 * MANY - 16384 <= num_bytes <= 2 * MANY
    assert before - memory.used() > 2 * MANY - (8 << 20)
    assert not kept[10_000:20_000].any(), "its pages are gone"
    region.restore()
    assert [one.data_ptr() for one in (kept, gone, small)] == addresses
    assert torch.equal(kept, torch.arange(MANY // 8))
    assert view[0] == 10
    assert small.tolist() == [0, 1, 2, 3, 4]
    assert not gone.any(), "also where a page is shared with other memory"


def test_dropped_memory_without_a_whole_page_is_zeros() -> None:
    region = HostRegion()
    gone, beside = torch.ones(100), torch.ones(100)
    region.find = lambda: iter([gone])
    assert region.release([gone]) == 0
    region.restore()
    assert not gone.any()
    assert beside.all()


def assert_refused(message: str) -> None:
    """Of a release, whose memory stays as it is."""
    values = torch.ones(1 << 20)
    region = HostRegion()
    region.find = lambda: iter([values])
    with pytest.raises(ConfigError, match=message):
        region.release([])
    assert values.all()


def test_release_that_finds_no_room_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no device that is always full")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: full.open("wb"))
    assert_refused("do not fit")


def test_release_that_can_make_no_file_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert_refused("TMPDIR")
