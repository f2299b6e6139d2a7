"""docs/models.md names every family, with the fast paths that its layers take."""

from __future__ import annotations

import re
from pathlib import Path

from specengine.core.registry import MODEL_FAMILIES, load_place
from specengine.layers.compute_paths import FAST_PATHS
from tests.support.families import FAMILIES, small_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ROW = re.compile(
    r"^\| `(?P<name>\w+)` \|.*\| (?P<paths>[^|]+) \| (?P<gguf>[^|]+) \|$", re.MULTILINE
)


def test_page_has_a_row_of_each_registered_family() -> None:
    rows = {row["name"]: row for row in ROW.finditer(PAGE.read_text())}
    assert list(rows) == list(MODEL_FAMILIES)
    for family, name in FAMILIES.items():
        model = load_place(MODEL_FAMILIES[name])
        specs = model.layer_specs(small_config(family))
        taken = [path.name for path in FAST_PATHS if path.takes(*specs)]
        assert rows[name]["paths"] == ", ".join(taken), name
        assert rows[name]["gguf"] == ("yes" if vars(model).get("gguf") else "no"), name
