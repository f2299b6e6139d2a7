"""Models by hub id, where a hub is reachable."""

from __future__ import annotations

import re
from pathlib import Path

from specengine.core.errors import ModelLoadError

_DESCRIPTIONS = ["*.json", "tokenizer.model", "*.jinja"]


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None


def fetch_from_hub(name: str, with_weights: bool, pickled: bool = False) -> Path:
    """Directory of a snapshot in the hub's cache; brought there where it is missing.

    Safetensors, configuration and tokenizer only; pickled: where it has no safetensors, *.bin files
    too, which the loader does not read. Raises ModelLoadError when neither the hub nor
    its cache has the model.
    """
    from huggingface_hub import snapshot_download

    weights = ["*.safetensors"] if with_weights else []
    try:
        directory = Path(snapshot_download(name, allow_patterns=[*_DESCRIPTIONS, *weights]))
        if pickled and not any(directory.glob("*.safetensors")):
            return Path(snapshot_download(name, allow_patterns=[*_DESCRIPTIONS, "*.bin"]))
        return directory
    except Exception as error:
        raise ModelLoadError(
            f"{name} is no local directory, and the hub did not give it: {error}. Download the "
            "model elsewhere and give its directory or GGUF file"
        ) from error
