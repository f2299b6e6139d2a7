"""Recipes: configurations that come with the project, called by their file's name."""

from __future__ import annotations

import difflib
from pathlib import Path

from specengine.core.errors import ConfigError

RECIPES = Path(__file__).parent / "recipes"


def find_recipe(name: str) -> Path:
    """A YAML file by its path, or a recipe by its name. Raises ConfigError naming the recipes."""
    path = Path(name)
    if path.is_file():
        return path
    known = {one.stem: one for one in sorted(RECIPES.glob("*.yaml"))}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, list(known), n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"{name} is neither a file nor a recipe; {guess}recipes are {', '.join(known)}"
    )
