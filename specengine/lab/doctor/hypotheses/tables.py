"""Embedding and head: the drafter's own, or the target's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from specengine.lab.doctor.examined_drafter import ExaminedDrafter
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.hypothesis import Hypothesis, Trial

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def hypotheses(drafter: ExaminedDrafter, trial: Trial) -> Iterator[Hypothesis]:
    files = trial.files
    if not drafter.has_features:
        yield from _tying(files)
        return
    for name, what in ((_EMBEDDING, "embedding"), (_HEAD, "head")):
        if files.has(name):
            yield Hypothesis(
                "embedding and head",
                f"the draft's own {what} is not what it was trained with; the target's is",
                f"take {files.name_of(name)} out of the weights (--write-fixed does it)",
                partial(_without, name=name),
            )
    if files.has(_EMBEDDING, _HEAD) and _alike(files):
        yield Hypothesis(
            "embedding and head",
            "embedding and head carry each other's name",
            f"{_EMBEDDING} and {_HEAD}: exchange them (--write-fixed does it)",
            lambda f: f.swapped(_EMBEDDING, _HEAD),
        )


def _without(files: DraftFiles, name: str) -> DraftFiles:
    return files.without(name)


def _alike(files: DraftFiles) -> bool:
    embedding, head = files.get(_EMBEDDING), files.get(_HEAD)
    return embedding is not None and head is not None and embedding.shape == head.shape


def _tying(files: DraftFiles) -> Iterator[Hypothesis]:
    """Of a whole model."""
    embedding = "model." + _EMBEDDING
    if files.has(embedding, _HEAD):
        yield Hypothesis(
            "embedding and head",
            "the head is the embedding (tied)",
            f"config.json: set tie_word_embeddings to true, and take {_HEAD} out of the weights",
            lambda f: f.without(_HEAD).with_config(tie_word_embeddings=True),
        )
