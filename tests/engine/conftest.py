"""A target of little surprise, and drafters that often guess it right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import SpecConfig
from tests.draft.eagle_checkpoints import almost_bigram, oracle_eagle, oracle_eagle3
from tests.draft.mtp_reading import add_mtp
from tests.support.judged_rounds import Subject, make_lookup_prompts, make_subjects
from tests.support.mtp_targets import TARGETS, predictable
from tests.support.torn_prompts import TornPrompts


@pytest.fixture
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether `make test-all` alone runs this case, where a run may be longer than it takes to meet
    each boundary once."""
    return request.node.get_closest_marker("slow") is not None


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


@pytest.fixture(scope="session")
def folders(
    target: Path,
    drafters: dict[str, str],
    small_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, SpecConfig]]:
    """Each drafter's target, and how it drafts."""
    found, folder = {}, tmp_path_factory.mktemp("weighed")
    unsure = almost_bigram(folder / "standalone", target, 3.0)  # says other things, now and then
    for name, path in (drafters | {"STANDALONE": str(unsure)}).items():
        spec = SpecConfig(algorithm=name, draft_model_path=path, num_steps=3)
        found[name] = target, spec
    for name, form, layers in (("MTP", "deepseek", 1), ("MTP layers", "mimo", 3)):
        folder = tmp_path_factory.mktemp(f"weighed-{layers}")
        add_mtp(small_models[TARGETS[form]], folder, form, layers)
        predictable(folder, form, layers, residue=0.2)
        found[name] = folder, SpecConfig(algorithm="MTP", num_steps=3)
    return found


@pytest.fixture(scope="session")
def torn() -> dict[Path, list[list[int]]]:
    """Prompts of each target of which suffixes draft trees, and of which nothing."""
    return TornPrompts()


@pytest.fixture(scope="session")
def lookup_prompts(target: Path) -> list[Any]:
    return make_lookup_prompts(target)


@pytest.fixture(scope="session")
def subjects(
    folders: dict[str, tuple[Path, SpecConfig]],
    small_models: dict[str, Path],
    lookup_prompts: list[Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Subject]:
    """Drafters of rounds whose rule judges drafts."""
    given = small_models[TARGETS["mimo"]], tmp_path_factory.mktemp("mtp-trees"), lookup_prompts
    return make_subjects(folders, *given)
