"""What a trace says of the engine that it was recorded with."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specengine.core.config import EngineConfig
from specengine.core.drafter import Drafter
from specengine.core.paths import user_path
from specengine.core.version import __version__
from specengine.draft.zoo.shipped import SHIPPED_DRAFTERS, draft_path_of
from specengine.runner.loader.loaded_model import LoadedModel

_EDGE = 1 << 20  # bytes


def trace_header(
    config: EngineConfig, loaded: LoadedModel, drafter: Drafter, algorithm: str, verifier: str
) -> dict[str, Any]:
    """config: resolved. algorithm and verifier: as the registry calls them."""
    source, spec = loaded.source, config.spec
    template = getattr(loaded.tokenizer, "chat_template", None)
    weights = source.directory or source.gguf_file
    return {
        "mode": "positions" if config.trace.trace_every_position else "rounds",
        "is_sampled": spec.draft_sampling,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "specengine": __version__,
        "torch": torch.__version__,
        "device": config.model.device,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "model": source.name,
        "model_fingerprint": None if weights is None else fingerprint(weights),
        "vocab_size": loaded.model.vocab_size,
        "chat_template_sha256": None if template is None else _sha256(str(template).encode()),
        "algorithm": algorithm,
        "verifier": verifier,
        "draft_vocab_size": drafter.draft_vocab_size,
        "draft_fingerprint": _draft_fingerprint(draft_path_of(spec, config.model)),
        "spec": asdict(spec),
    }


def fingerprint(path: Path) -> str:
    """A hash of a weights' file, or of a directory's: SHA-256 of names, sizes, and the first and
    last MiB of each. Tells files apart without reading them whole."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE))
            stream.seek(max(0, size - _EDGE))
            digest.update(stream.read(_EDGE))
    return digest.hexdigest()


def _draft_fingerprint(path: str | None) -> str | None:
    if path is None:
        return None
    shipped = SHIPPED_DRAFTERS.get(path)
    directory = user_path(path) if shipped is None else shipped.directory
    return fingerprint(directory) if directory.is_dir() else None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
