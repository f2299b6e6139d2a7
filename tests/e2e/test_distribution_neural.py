"""Output stays the target's when drafts are sampled from a draft model's own distribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specengine import SpecConfig
from tests.draft import eagle_checkpoints as checkpoints
from tests.e2e.test_distribution import SAMPLES, Joint, draw, make, p_value, target

pytestmark = pytest.mark.slow

__all__ = ["target"]  # the fixture

CHAIN: dict[str, Any] = {"num_steps": 3}
TREE: dict[str, Any] = {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 9}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("STANDALONE", CHAIN, "block"),
    ("EAGLE3", TREE, "sibling"),
]


@pytest.mark.parametrize(("algorithm", "shape", "verify"), CASES)
def test_sampled_drafts_leave_the_distribution(
    algorithm: str,
    shape: dict[str, Any],
    verify: str,
    target: tuple[Path, Joint],
    small_models: dict[str, Path],
    tmp_path: Path,
) -> None:
    """The drafts know the bias towards three letters, and nothing else of the target. Four siblings
    are asked for, so that every node's distribution is used up."""
    folder, joint = target
    draft = small_models["llama"]
    if algorithm == "EAGLE3":
        draft = checkpoints.eagle3(tmp_path / "draft", folder, draft_vocab=300)
    spec = SpecConfig(
        algorithm=algorithm,
        adaptive=False,
        draft_model_path=str(draft),
        draft_sampling=True,
        verify=verify,
        **shape,
    )
    llm = make(folder, spec)
    assert p_value(draw(llm), joint) > 1e-3
    totals = llm.engine.stats().spec
    assert SAMPLES / 10 < totals.num_accepted_tokens < totals.num_draft_tokens
