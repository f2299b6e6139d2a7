"""Directories of drafts, written whole."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from specengine.core.errors import ConfigError


def check_free(destination: Path, force: bool) -> None:
    """Raises ConfigError for a place that holds something already."""
    if destination.is_dir() and (force or not any(destination.iterdir())):
        return
    if destination.exists():
        raise ConfigError(f"{destination} is there already; --force replaces a directory")


@contextmanager
def whole_or_not_at_all(destination: Path) -> Iterator[Path]:
    """A folder beside the destination, which takes its place at the end."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{destination.name}-", dir=destination.parent
    ) as parent:
        folder = Path(parent, "new")
        folder.mkdir()
        yield folder
        if destination.exists():
            destination.rename(Path(parent, "old"))
        folder.rename(destination)


def write_draft(folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """config.json and model.safetensors. Tensors that share memory are written each on its own."""
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
