"""Facts about a drafter that need no comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from specengine.lab.doctor.features import ALIKE, LayerMatch
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.target_rows import TargetRows

# Share of the target's tokens that a draft vocabulary should have.
_COVERED = 0.5
_SPECIAL_CASES = 3


@dataclass(frozen=True)
class Check:
    """explains: were it not so, the acceptance that was measured would follow from it."""

    name: str
    holds: bool
    measured: str
    remedy: str = ""
    explains: bool = True


def check_features(found: list[LayerMatch] | str) -> Check:
    """Cosines of the target's states in training and in serving."""
    name = "training-side and serving-side features agree"
    if isinstance(found, str):
        return Check(name, holds=True, measured=f"not compared: {found}")
    worst = min(found, key=lambda match: match.mean)
    measured = f"cosine {worst.mean:.4f} on average where it is lowest, after {_place(worst)}"
    bad = [match for match in found if match.mean < ALIKE]
    if not bad:
        return Check(name, holds=True, measured=measured)
    remedy = (
        f"the engine computes other states than transformers from {_place(bad[0])} on: compare "
        "config.json of the target (rotary frequencies, norms, dtype) with what trained the draft"
    )
    return Check(name, holds=False, measured=measured, remedy=remedy)


def _place(match: LayerMatch) -> str:
    return "the final norm" if match.layer is None else f"layer {match.layer}"


def check_coverage(files: DraftFiles, texts: Sequence[TargetRows], accepted: float) -> Check | None:
    """How much of what the target says a draft vocabulary can say at all. accepted: share of first
    drafted tokens that are accepted; far below the coverage, something else is wrong."""
    d2t = files.get("d2t")
    if d2t is None:
        return None
    known = d2t.to(torch.int64) + torch.arange(len(d2t))
    said = torch.cat([rows.greedy[rows.text.prompt_len - 1 :].cpu() for rows in texts])
    share = float(torch.isin(said, known).float().mean())
    return Check(
        "the draft vocabulary covers the target's text",
        share >= _COVERED,
        f"{share:.1%} of {len(said)} tokens",
        "" if share >= _COVERED else "train a draft whose vocabulary is chosen on such texts",
        explains=accepted > share / 2,
    )


def check_tokenizer(draft: Path, target: Any) -> Check | None:
    """Of the tokenizer beside the draft, where there is one."""
    path = draft / "tokenizer.json"
    if not path.is_file():
        return None
    ours, theirs = Tokenizer.from_file(str(path)).get_vocab(), target.get_vocab()
    every = ours.keys() | theirs.keys()
    other = sorted(token for token in every if ours.get(token) != theirs.get(token))
    shown = ", ".join(map(repr, other[:_SPECIAL_CASES]))
    return Check(
        "draft and target have one tokenizer",
        not other,
        f"{len(other)} of {len(theirs)} tokens differ" + (f": {shown}" if other else ""),
        "take the draft of this target" if other else "",
    )
