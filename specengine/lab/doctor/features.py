"""The target's states as training sees them (transformers) beside those that serving keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from specengine.engine.resolve import torch_dtype
from specengine.lab.doctor.target_rows import TargetRows
from specengine.runner.loader.loaded_model import LoadedModel

ALIKE = 0.98


@dataclass(frozen=True)
class LayerMatch:
    """layer: counted from 0 by output; None is the last state after the final norm. mean and
    lowest cosine over tokens."""

    layer: int | None
    mean: float
    lowest: float


def compare_features(loaded: LoadedModel, texts: Sequence[TargetRows]) -> list[LayerMatch] | str:
    """One a layer but the last, whose output transformers gives only with the final norm, and that
    state. A reason instead, where transformers cannot read the model."""
    try:
        reference = _reference(loaded)
    except Exception as error:  # whatever transformers says to a model that it does not know
        return f"transformers cannot read the target: {error}"
    cosines = [_cosines(reference, rows) for rows in texts]
    joined = torch.cat(cosines, dim=1)
    numbers: list[int | None] = [*range(len(joined) - 1), None]
    return [
        LayerMatch(layer, float(row.mean()), float(row.min()))
        for layer, row in zip(numbers, joined, strict=True)
    ]


def _reference(loaded: LoadedModel) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    directory = loaded.source.directory
    if directory is None:
        raise ValueError(f"{loaded.source.name} is no directory of safetensors")
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch_dtype(loaded.config.model.dtype),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,  # no pickled file, which could run code
    )
    return model.to(loaded.device).eval()


@torch.inference_mode()
def _cosines(reference: Any, rows: TargetRows) -> Tensor:
    """float32 [L, n]"""
    states = reference.base_model(rows.tokens[None], output_hidden_states=True).hidden_states
    layers = rows.layers.unbind(1)
    pairs = [*zip(layers[:-1], states[1:-1], strict=True), (rows.final, states[-1])]
    found = [cosine_similarity(ours.float(), theirs[0].float(), dim=-1) for ours, theirs in pairs]
    return torch.stack(found).cpu()
