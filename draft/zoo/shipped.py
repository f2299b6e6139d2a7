"""Drafters that come with the project and have a name of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specengine.core.config import ModelConfig, SpecConfig
from specengine.draft.names import algorithm_name


@dataclass(frozen=True)
class ShippedDrafter:
    """algorithm: as the registry calls it. target: the built-in model that it drafts for."""

    name: str
    algorithm: str
    target: str
    parameters: str
    description: str

    @property
    def directory(self) -> Path:
        return Path(__file__).parent / self.name


_DRAFTERS = (
    ShippedDrafter(
        "smollm2-135m-eagle3",
        "EAGLE3",
        "smollm2",
        "14M",
        "EAGLE-3 drafter for SmolLM2-135M-Instruct (Apache-2.0)",
    ),
    ShippedDrafter("tiny-eagle3", "EAGLE3", "tiny", "0.9M", "EAGLE-3 drafter"),
    ShippedDrafter("tiny-mtp", "MTP", "tiny", "0.7M", "multi-token-prediction layer"),
    ShippedDrafter("tiny-standalone", "STANDALONE", "tiny", "0.9M", "smaller model"),
)

SHIPPED_DRAFTERS = {drafter.name: drafter for drafter in _DRAFTERS}


def draft_path_of(spec: SpecConfig, target: ModelConfig) -> str | None:
    """The draft model that was named, or else the shipped one of this algorithm and target; None
    where there is neither. Beside random weights nothing that ships is of use."""
    if spec.draft_model_path is not None or spec.algorithm is None:
        return spec.draft_model_path
    if target.load_format == "dummy":
        return None
    wanted = (target.model, algorithm_name(spec.algorithm))
    for drafter in _DRAFTERS:
        if (drafter.target, drafter.algorithm) == wanted:
            return drafter.name
    return None
