"""One server of several processes for all that is done to it: to start one takes ten seconds of a
core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hostile import soak
from tests.support.kept import Kept
from tests.support.processes import Served, serving
from tests.support.waiting import until


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="session")
def servers(folder: Path) -> Iterator[Kept[Served]]:
    times = ("--max-restarts", "20", "--shutdown-timeout", "100")
    servers = Kept(lambda: serving(folder, *soak.flags(folder), *soak.DRAFTS, *times))
    yield servers
    servers.end()


@pytest.fixture
def served(servers: Kept[Served]) -> Served:
    """With both of its front ends, and an engine that serves."""
    served = servers.get()
    until(lambda: len(served.front_ends()) == 2 and served.is_ready())
    return served
