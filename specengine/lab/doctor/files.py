"""A drafter's files in memory, to be edited and written anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.runner.loader.hf_directory import iterate_safetensors

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class DraftFiles:
    """config.json and the tensors of the drafter, under the file's own names.

    parameter: what a tensor of the file is called in the model, by which the rest of the doctor
    knows it. is_whole: the tensors are those in the directory, all and unedited.
    """

    directory: Path
    raw: dict[str, Any]
    tensors: dict[str, Tensor]
    parameter: Callable[[str], str]
    is_whole: bool = False

    @classmethod
    def read(
        cls, directory: Path, parameter: Callable[[str], str], owns: Callable[[str], bool]
    ) -> DraftFiles:
        """owns: which tensors are the drafter's, where the target's lie beside them. Raises
        ModelLoadError."""
        try:
            raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{directory / 'config.json'} cannot be read: {error}") from error
        every = dict(iterate_safetensors(directory))
        tensors = {name: tensor for name, tensor in every.items() if owns(name)}
        return cls(directory, raw, tensors, parameter, is_whole=len(tensors) == len(every))

    def name_of(self, parameter: str) -> str | None:
        """The file's name of a parameter of the model."""
        names = (name for name in self.tensors if self.parameter(name) == parameter)
        return next(names, None)

    def get(self, parameter: str) -> Tensor | None:
        name = self.name_of(parameter)
        return None if name is None else self.tensors[name]

    def has(self, *parameters: str) -> bool:
        return all(self.name_of(parameter) is not None for parameter in parameters)

    def with_tensors(self, edited: Mapping[str, Tensor]) -> DraftFiles:
        """By parameter. One that the file lacks is added under the parameter's own name."""
        named = {self.name_of(name) or name: tensor for name, tensor in edited.items()}
        return replace(self, tensors={**self.tensors, **named}, is_whole=False)

    def without(self, *parameters: str) -> DraftFiles:
        kept = {
            name: tensor
            for name, tensor in self.tensors.items()
            if self.parameter(name) not in parameters
        }
        return replace(self, tensors=kept, is_whole=False)

    def swapped(self, first: str, second: str) -> DraftFiles:
        one, other = self.get(first), self.get(second)
        assert one is not None
        assert other is not None
        return self.with_tensors({first: other, second: one})

    def with_config(self, **fields: Any) -> DraftFiles:
        return replace(self, raw={**self.raw, **fields})

    @property
    def layer_section(self) -> dict[str, Any]:
        """The part of the configuration that describes the decoder layer."""
        return dict(self.raw.get("transformer_layer_config") or self.raw)

    def with_layer_config(self, **fields: Any) -> DraftFiles:
        nested = self.raw.get("transformer_layer_config")
        if nested is None:
            return self.with_config(**fields)
        return self.with_config(transformer_layer_config={**nested, **fields})

    def write(self, directory: Path) -> None:
        """As a directory that loads, where files without edits are links."""
        self._write(directory, lambda path, place: place.symlink_to(path.resolve()))

    def write_whole(self, directory: Path) -> None:
        """As a directory of its own. Raises ConfigError as require_new does."""
        require_new(directory)
        self._write(directory, shutil.copy2)

    def _write(self, directory: Path, take: Callable[[Path, Path], Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.raw, indent=2), encoding="utf-8")
        weights = {path for pattern in _WEIGHTS for path in self.directory.glob(pattern)}
        left_out = {"config.json"} if self.is_whole else {"config.json", *(p.name for p in weights)}
        for path in self.directory.iterdir():
            if path.is_file() and path.name not in left_out:
                take(path, directory / path.name)
        if not self.is_whole:
            tensors = {name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def require_new(directory: Path) -> None:
    """Raises ConfigError for a directory that holds something already."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is not empty; name a new directory for the fixed draft")
