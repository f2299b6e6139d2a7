"""Registries name what is there, and cost nothing until it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from specengine.core.config import ModelConfig, SpecConfig
from specengine.core.drafter import Drafter
from specengine.core.registry import (
    ATTENTION_BACKENDS,
    DRAFTERS,
    MODEL_FAMILIES,
    VERIFIERS,
    load_place,
)
from specengine.target.verify.base import TreeVerifier


@pytest.mark.parametrize(
    ("registry", "base"),
    [(DRAFTERS, Drafter), (VERIFIERS, TreeVerifier), (MODEL_FAMILIES, nn.Module)],
    ids=["drafters", "rules", "families"],
)
def test_each_place_holds_a_class_of_its_kind(registry: dict[str, str], base: type) -> None:
    for name, place in registry.items():
        assert issubclass(load_place(place), base), name


def test_families_are_registered_under_the_names_of_their_classes() -> None:
    assert [load_place(place).__name__ for place in MODEL_FAMILIES.values()] == [*MODEL_FAMILIES]


def test_choices_and_help_of_flags_are_the_registered_names() -> None:
    assert SpecConfig.options()["verify"].choices == ("auto", *VERIFIERS)
    assert ModelConfig.options()["attention_backend"].choices == ("auto", *ATTENTION_BACKENDS)
    assert all(name in SpecConfig.options()["algorithm"].help for name in DRAFTERS)


def test_flags_know_the_names_without_importing_what_they_name() -> None:
    script = (
        "import sys\n"
        "import specengine.core.config\n"
        "upper = ('draft', 'target', 'runner', 'layers', 'engine')\n"
        "rooms = tuple(f'specengine.{one}' for one in upper)\n"
        "print([name for name in sys.modules if name == 'torch' or name.startswith(rooms)])\n"
    )
    given = [sys.executable, "-c", script]
    found = subprocess.run(given, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
