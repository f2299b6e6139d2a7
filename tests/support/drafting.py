"""A draft of each kind but MTP for a small model, whatever the model is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specengine import SpecConfig
from tests.draft.eagle_checkpoints import RANDOM

NGRAM = SpecConfig(algorithm="NGRAM", adaptive=False, num_draft_tokens=6, ngram_min_match=1)
OF_TEXT = {
    "NGRAM": NGRAM,
    "SUFFIX": SpecConfig(algorithm="SUFFIX", adaptive=False, num_draft_tokens=6),
    "hybrid": replace(NGRAM, hybrid_suffix=True, hybrid_suffix_min_match=3),
}
# As columns of docs/support.md name them.
DRAFTS = (*OF_TEXT, *RANDOM, "STANDALONE")


def drafting(drafts: str, target: Path, dense: Path, folder: Path) -> SpecConfig:
    """dense: a checkpoint of the target's measures, for which random drafts are written into the
    folder. STANDALONE has the target draft for itself."""
    if drafts in OF_TEXT:
        return OF_TEXT[drafts]
    draft = target if drafts == "STANDALONE" else RANDOM[drafts](folder / "draft", dense)
    return SpecConfig(algorithm=drafts, num_steps=3, draft_model_path=str(draft), adaptive=False)
