"""What tests of ranks share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specengine.core.config_sources import config_from_flags
from specengine.core.parallel import Link
from specengine.engine.parallel.ranks import start_ranks
from specengine.engine.phases import Phases
from tests.support.ranks import SMALL

_links: list[Any] = []  # to ranks that run
LAST = "last_of_its_ranks"  # the fixture of tests that end the ranks which others share


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They come last in this folder: ranks take as long to start as a whole file of tests."""
    here = [number for number, one in enumerate(items) if one.path.parent == Path(__file__).parent]
    ordered = sorted((items[one] for one in here), key=lambda one: LAST in fixtures_of(one))
    for number, one in zip(here, ordered, strict=True):
        items[number] = one


def fixtures_of(item: pytest.Item) -> list[str]:
    found: list[str] = getattr(item, "fixturenames", [])
    return found


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ranks end with the tests of this folder: while they wait, they look for messages a thousand
    times a second."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        while _links:
            _links.pop().watch.end()


@pytest.fixture(scope="module")
def link() -> Link:
    """To two ranks, which are started once a process: each takes as long as a whole file of tests.
    Where they have ended since, to two new ones."""
    if not _links or _links[-1].watch.failure is not None:
        _links.append(start_ranks(config_from_flags({**SMALL, "tp_size": 2}), Phases()))
    found: Link = _links[-1]
    return found


@pytest.fixture
def last_of_its_ranks(link: Link) -> Link:
    """The same, for a test that ends them. It runs after those that only use them."""
    return link


@pytest.fixture
def one_thread_a_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deeper(small_models: Any, tmp_path: Path) -> Path:
    """Of as many layers as EAGLE-3's features want, without weights."""
    for path in small_models["qwen3moe"].glob("*.json"):
        config = json.loads(path.read_text())
        if path.name == "config.json":
            config["num_hidden_layers"] = 7
        (tmp_path / path.name).write_text(json.dumps(config))
    return tmp_path
