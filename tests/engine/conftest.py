"""A target of little surprise, and drafters that often guess it right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.draft.eagle_checkpoints import almost_bigram, oracle_eagle, oracle_eagle3


@pytest.fixture(scope="session")
def target(small_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return almost_bigram(folder / "target", small_models["llama"], 0.03)


@pytest.fixture(scope="session")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where each algorithm's checkpoint lies."""
    folder = tmp_path_factory.mktemp("drafters")
    made = {
        "EAGLE": oracle_eagle(folder / "eagle", target, noise=0.3),
        "EAGLE3": oracle_eagle3(folder / "eagle3", target, 250, focus=20.0),
        "STANDALONE": almost_bigram(folder / "standalone", target, 1.0),
    }
    return {name: str(path) for name, path in made.items()}
