"""A draft of each kind for a small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specengine import SpecConfig
from tests.draft.eagle_checkpoints import RANDOM
from tests.draft.mtp_reading import add_mtp

NGRAM = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=6, ngram_min_match=1)
OF_TEXT = {
    "NGRAM": NGRAM,
    "SUFFIX": SpecConfig(algorithm="SUFFIX", adaptive=False, num_draft_tokens=6),
    "hybrid": replace(NGRAM, hybrid_suffix=True, hybrid_suffix_min_match=3),
}
OF_MODELS = {**RANDOM, "MTP": lambda folder, dense: add_mtp(dense, folder, "deepseek", 1)}
# As columns of docs/support.md name them.
DRAFTS = (*OF_TEXT, *OF_MODELS, "STANDALONE")


def drafting(drafts: str, target: Path, dense: Path, folder: Path) -> SpecConfig:
    """dense: a checkpoint of the target's measures, for which random drafts are written into the
    folder. STANDALONE has the target draft for itself."""
    if drafts in OF_TEXT:
        return OF_TEXT[drafts]
    draft = target if drafts == "STANDALONE" else OF_MODELS[drafts](folder / "draft", dense)
    return SpecConfig(algorithm=drafts, num_steps=3, draft_model_path=str(draft), adaptive=False)
