"""Shapes of trees that a smaller model drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specengine import SpecConfig

# topk, levels, nodes, static
SHAPES = {
    "2": (2, 3, 6, False),
    "3": (3, 4, 16, False),
    "4, static": (4, 3, 12, True),
    "one level": (4, 1, 4, False),
    "few nodes": (2, 4, 4, False),
}


def specs_of(folders: dict[str, tuple[Path, SpecConfig]]) -> dict[str, SpecConfig]:
    """folders: the fixture."""
    return {
        name: replace(
            folders["STANDALONE"][1],
            adaptive=False,
            eagle_topk=topk,
            num_steps=steps,
            num_draft_tokens=nodes,
            static_tree=static,
        )
        for name, (topk, steps, nodes, static) in SHAPES.items()
    }
