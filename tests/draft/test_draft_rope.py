"""What a trained draft rotates by."""

from __future__ import annotations

import pytest
import torch
from transformers import HunYuanDenseV1Config

from specengine.draft.rope import draft_rope
from specengine.layers.rotary import rope_frequencies, rope_parameters


@pytest.mark.parametrize("alpha", [None, 50.0])
def test_draft_of_a_dynamic_rotation_turns_as_its_target(alpha: float | None) -> None:
    """A fixed alpha stretches the base of every text, which a plain layer can have."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": alpha}
    target = HunYuanDenseV1Config(head_dim=64, rope_parameters=rope)
    found = draft_rope(target)
    assert found["rope_type"] == "default"
    own, _ = rope_frequencies(64, 1024, found)
    expected, _ = rope_frequencies(64, 1024, rope_parameters(target))
    torch.testing.assert_close(own, expected, rtol=1e-6, atol=0)
