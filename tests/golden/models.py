"""Models of the golden traces: those that ship, and small random ones for what does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import specengine.draft.zoo as drafters
import specengine.target.zoo as targets
from specengine.core.config_sources import config_from_flags
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.runner.loader.loaded_model import LoadedModel
from tests.conftest import save_tokenizer
from tests.draft.eagle_checkpoints import oracle_eagle
from tests.draft.mtp_reading import add_mtp
from tests.support.families import reference_class, small_config
from tests.support.mtp_targets import predictable

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "disable_radix_cache": True,
}
_ZOO = {"tiny": targets, "tiny-eagle3": drafters, "tiny-mtp": drafters, "tiny-standalone": drafters}


class Models:
    """Directories by name, made in a folder when first asked for. noise: each weight is off by a
    normal factor of so much, so that a choice which hangs on rounding is seen. only: of the model
    of this name, not of all."""

    def __init__(self, folder: Path, noise: float = 0.0, only: str | None = None) -> None:
        self.folder, self.noise, self.only = folder, noise, only
        self._made: dict[str, Path] = {}
        self._loaded: dict[str, LoadedModel] = {}

    def path(self, name: str) -> str:
        if name not in self._made:
            self._made[name] = self._shaken(name, self._exact(name))
        return str(self._made[name])

    def loaded(self, name: str) -> LoadedModel:
        """As a target, read once: engines lend each other its weights."""
        if name not in self._loaded:
            config = config_from_flags({"model": self.path(name), **FLAGS})
            self._loaded[name] = load(config, Phases())
        return self._loaded[name]

    def _exact(self, name: str) -> Path:
        if name in _ZOO:
            return Path(next(iter(_ZOO[name].__path__))) / name
        if name == "tiny-eagle":
            return oracle_eagle(self.folder / name, self._exact("tiny"), noise=0.1)
        assert name == "small-mtp-layers"
        return _mtp_layers(self.folder / name)

    def _shaken(self, name: str, folder: Path) -> Path:
        if not self.noise or self.only not in (None, name):
            return folder
        found = self.folder / f"{name}-shaken"
        shutil.copytree(folder, found)
        numbers = torch.Generator().manual_seed(0)
        for file in found.glob("*.safetensors"):
            tensors = load_file(file)
            for key, one in tensors.items():
                if one.is_floating_point():
                    factor = 1 + self.noise * torch.randn(one.shape, generator=numbers)
                    tensors[key] = one.float() * factor
            save_file(tensors, file, metadata={"format": "pt"})
        return found


def _mtp_layers(folder: Path) -> Path:
    """Three of them, after a random target that they often guess."""
    small, family = folder.with_name("small-qwen2"), "qwen2"
    config = small_config(family)
    config.save_pretrained(small)
    model = reference_class(family)(config).eval().float()
    model.save_pretrained(small)
    file, numbers = small / "model.safetensors", torch.Generator().manual_seed(3)
    tensors = load_file(file)
    for name in sorted(tensors):  # whatever transformers draws
        if tensors[name].dim() > 1:
            tensors[name] = 0.12 * torch.randn(tensors[name].shape, generator=numbers)
    save_file(tensors, file, metadata={"format": "pt"})
    save_tokenizer(small)
    folder.mkdir()
    torch.manual_seed(4)
    add_mtp(small, folder, "mimo", 3)
    predictable(folder, "mimo", 3, residue=0.2)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] > 310  # FEATURES' bias
    return folder
