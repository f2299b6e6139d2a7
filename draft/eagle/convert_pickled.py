"""Drafts published as `pytorch_model.bin`, written as safetensors: nothing else here unpickles.

The file is read with `weights_only=True`, which makes tensors and plain containers and runs no code
of the file's. The layout stays; config.json gains what only the tensors said.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.draft.eagle.checkpoint import read_json
from specengine.draft.eagle.convert_files import (
    check_free,
    whole_or_not_at_all,
    write_draft,
)
from specengine.draft.eagle.convert_proof import TargetMeasures, require_loads
from specengine.draft.eagle.layer import parameter_name
from specengine.runner.loader.hf_directory import PICKLED, iterate_safetensors

Tensors = dict[str, Tensor]

_INDEX = "pytorch_model.bin.index.json"
_ANY_TARGET_LAYERS = 64  # of a substitute target, where the draft does not say what it reads


@dataclass(frozen=True)
class Rewritten:
    """algorithm: EAGLE or EAGLE3. added: keys of config.json that were not there."""

    algorithm: str
    num_tensors: int
    added: tuple[str, ...]


def is_pickled(directory: Path) -> bool:
    """Whether its weights are pickled, and nothing else."""
    names = [path.name for pattern in PICKLED for path in directory.glob(pattern)]
    return bool(names) and not any(directory.glob("*.safetensors"))


def rewrite(directory: Path, destination: Path, force: bool) -> Rewritten:
    """Tensors are read back and compared, and the draft is loaded as the engine loads it. Raises
    ConfigError or ModelLoadError, and then leaves everything as it was."""
    check_free(destination, force)
    tensors = read_pickled(directory)
    raw = read_json(directory / "config.json")
    shapes = {parameter_name(name): list(tensor.shape) for name, tensor in tensors.items()}
    is_eagle3 = "layers.0.hidden_norm.weight" in shapes
    if not is_eagle3 and "fc.weight" not in shapes:
        raise ModelLoadError(
            f"{directory} is no draft of EAGLE: it has neither fc nor hidden_norm. Drafts alone "
            "are converted; write other models as safetensors with what made them"
        )
    added = _missing_fields(raw, shapes, is_eagle3)
    with whole_or_not_at_all(destination) as folder:
        write_draft(folder, {**raw, **added}, tensors)
        _compare(tensors, dict(iterate_safetensors(folder)), destination)
        require_loads(folder, _measures({**raw, **added}, shapes), is_eagle3)
    return Rewritten("EAGLE3" if is_eagle3 else "EAGLE", len(tensors), tuple(sorted(added)))


def read_pickled(directory: Path) -> Tensors:
    """Every tensor of a directory's .bin files. Raises ModelLoadError for a file that holds
    anything but a table of tensors."""
    tensors: Tensors = {}
    for path in _files(directory):
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelLoadError(f"{path} holds more than tensors, or is cut: {reason}") from error
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(one, Tensor) for name, one in found.items()
        ):
            raise ModelLoadError(f"{path} is no table of tensors by name")
        if twice := sorted(found.keys() & tensors.keys()):
            raise ModelLoadError(f"{path} brings {', '.join(twice)} a second time")
        tensors |= found
    return tensors


def _files(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        names = set(read_json(directory / _INDEX).get("weight_map", {}).values())
        return [directory / Path(str(name)).name for name in sorted(names)]
    whole = directory / "pytorch_model.bin"
    files = [whole] if whole.is_file() else sorted(directory.glob("*.bin"))
    if not files:
        raise ModelLoadError(f"{directory} has no *.bin file; other pickled files are not read")
    return files


def _missing_fields(
    raw: dict[str, Any], shapes: dict[str, list[int]], is_eagle3: bool
) -> dict[str, Any]:
    """What the loader reads of config.json, where it lacks it and the tensors say it."""
    found: dict[str, Any] = {"num_hidden_layers": _num_layers(shapes)}
    q, k = (shapes.get(f"layers.0.self_attn.{name}_proj.weight") for name in "qk")
    if q is not None and k is not None and "num_attention_heads" in raw:
        found["head_dim"] = q[0] // int(raw["num_attention_heads"])
        found["num_key_value_heads"] = k[0] // int(raw.get("head_dim", found["head_dim"]))
    if "t2d" in shapes:
        found["vocab_size"] = shapes["t2d"][0]
    if "d2t" in shapes:
        found["draft_vocab_size"] = shapes["d2t"][0]
    if is_eagle3:
        found["eagle_config"] = {"use_aux_hidden_state": "fc.weight" in shapes}
    added = {key: value for key, value in found.items() if raw.get(key) is None}
    if is_eagle3 and raw.get("architectures") in (None, ["LlamaForCausalLM"]):
        # What other engines know the form by; the original's files say that it is a Llama.
        added["architectures"] = ["LlamaForCausalLMEagle3"]
    return added


def _num_layers(shapes: dict[str, list[int]]) -> int:
    found = (re.match(r"layers\.(\d+)\.", name) for name in shapes)
    return 1 + max((int(one.group(1)) for one in found if one is not None), default=0)


def _measures(raw: dict[str, Any], shapes: dict[str, list[int]]) -> TargetMeasures:
    """The measures of a target that the draft fits."""
    own = raw.get("eagle_config") or {}
    outputs = own.get("eagle_aux_hidden_state_layer_ids")
    num_features = len(outputs or (0, 0, 0)) if "layers.0.hidden_norm.weight" in shapes else 2
    size = int(raw["hidden_size"])
    if "fc.weight" in shapes:
        size = shapes["fc.weight"][1] // num_features
    return TargetMeasures(size, int(raw["vocab_size"]), 1 + max(outputs or (_ANY_TARGET_LAYERS,)))


def _compare(read: Tensors, written: Tensors, destination: Path) -> None:
    for name, tensor in read.items():
        other = written.get(name)
        if other is None or other.dtype != tensor.dtype or not torch.equal(other, tensor):
            raise ModelLoadError(f"{name} was written to {destination} otherwise than it was read")
