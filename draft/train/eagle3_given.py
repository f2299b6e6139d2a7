"""A drafter that exists, as where training begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specengine.core.errors import ConfigError
from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.draft.eagle.layer import parameter_name
from specengine.draft.train.eagle3 import Eagle3Draft
from specengine.draft.train.vocabulary import DraftVocabulary
from specengine.draft.zoo.shipped import SHIPPED_DRAFTERS
from specengine.runner.loader.hf_directory import iterate_safetensors

_LAYER = "layers.0."


@dataclass(frozen=True)
class GivenDrafter:
    name: str
    checkpoint: EagleCheckpoint

    @classmethod
    def read(cls, name: str) -> GivenDrafter:
        """By directory or shipped name. Raises ConfigError or ModelLoadError."""
        shipped = SHIPPED_DRAFTERS.get(name)
        return cls(name, EagleCheckpoint.read(name if shipped is None else str(shipped.directory)))

    @property
    def measures(self) -> dict[str, Any]:
        """Its sizes, layers and head, by the names of Eagle3Config."""
        raw, heads = self.checkpoint.layer_raw, self.checkpoint.layer_raw["num_attention_heads"]
        return {
            "own_head": self.checkpoint.has("lm_head.weight"),
            "intermediate_size": raw["intermediate_size"],
            "num_heads": heads,
            "num_kv_heads": raw.get("num_key_value_heads") or heads,
            "feature_layers": self.checkpoint.named_layers(),
            "draft_vocab_size": self.checkpoint.raw.get("draft_vocab_size"),
        }

    def vocabulary(self, target_vocab_size: int) -> DraftVocabulary:
        size = self.checkpoint.draft_vocab_size(target_vocab_size)
        ids = torch.arange(size)
        if self.checkpoint.has("d2t"):
            ids += self._tensors()["d2t"].long()
        return DraftVocabulary(ids, target_vocab_size)

    @torch.no_grad()
    def fill(self, module: Eagle3Draft) -> None:
        """Raises ConfigError, naming a tensor, for a form that training does not compute."""
        tensors = self._tensors()
        places = dict(module.named_parameters())
        unknown = sorted((tensors.keys() ^ places.keys()) - {"d2t", "t2d", "embed_tokens.weight"})
        if unknown:
            raise ConfigError(
                f"task.init={self.name}: {unknown[0]} is a tensor of one form of EAGLE-3, and "
                "training has another; begin without it"
            )
        for name, place in places.items():
            tensor = tensors[name].to(place)
            if name == "fc.weight":  # of features as they are
                tensor = tensor * module.feature_scale
            if tensor.shape != place.shape:
                raise ConfigError(
                    f"task.init={self.name}: {name} is {list(tensor.shape)}, and "
                    f"{list(place.shape)} for this target"
                )
            place.copy_(tensor)

    def _tensors(self) -> dict[str, Tensor]:
        """Under the names of the module to train."""
        assert self.checkpoint.directory is not None
        read = iterate_safetensors(self.checkpoint.directory)
        return {_module_name(name): tensor for name, tensor in read}


def _module_name(name: str) -> str:
    name = parameter_name(name)
    return "midlayer." + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name
