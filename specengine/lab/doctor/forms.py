"""What form a draft has, in words, by its algorithm."""

from __future__ import annotations

from specengine.draft.dflash.describe import describe as describe_dflash
from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.draft.eagle.describe import describe as describe_eagle
from specengine.draft.mtp.checkpoint import find_layers
from specengine.lab.doctor.files import DraftFiles


def describe(algorithm: str, files: DraftFiles, hidden_size: int) -> list[str]:
    """A line a fact. hidden_size: of the target, in whose directory MTP layers may lie. Raises
    ModelLoadError."""
    if algorithm == "MTP":
        return _of_mtp(files, hidden_size)
    if algorithm == "STANDALONE":
        return _of_model(files)
    checkpoint = EagleCheckpoint.read(str(files.directory))
    return describe_dflash(checkpoint) if algorithm == "DFLASH" else describe_eagle(checkpoint)


def _of_mtp(files: DraftFiles, hidden_size: int) -> list[str]:
    layers = find_layers(files.directory, hidden_size)
    first, count = layers[0], len(layers)
    embedding, head = (
        "its own" if is_own else "the target's"
        for is_own in (first.has_embed_tokens, first.has_lm_head)
    )
    return [
        f"MTP in the form of {first.form.name}, {count} layer{'s' * (count > 1)}",
        f"embedding: {embedding}, head: {head}",
    ]


def _of_model(files: DraftFiles) -> list[str]:
    raw = files.raw
    name = ", ".join(raw.get("architectures") or ["unknown architecture"])
    known = {
        "layers": raw.get("num_hidden_layers"),
        "hidden_size": raw.get("hidden_size"),
        "vocab_size": raw.get("vocab_size"),
    }
    sizes = [f"{what} {size}" for what, size in known.items() if size is not None]
    return [", ".join([f"a whole model: {name}", *sizes])]
