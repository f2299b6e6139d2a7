"""Token maps: the tokens that a draft may say, of a target's whole vocabulary (FR-Spec, Zhao et al.
2025, arXiv:2502.14856). Its head then computes those rows alone; text keeps its distribution, as
the target verifies with all of its own.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specengine.core.errors import ConfigError

_TENSOR = "token_ids"


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """int64 [D] on the CPU, ascending. A file of ids: JSON, safetensors with one tensor, or a list
    or tensor that torch saved (SGLang's form), which is read as such and runs no code. Raises
    ConfigError for what is no such file, for no ids, ids twice, or ids past the vocabulary."""
    try:
        found = _read(path)
        ids = torch.as_tensor(found, dtype=torch.int64, device="cpu")
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"--speculative-token-map {path} cannot be read: {error}") from error
    except (pickle.UnpicklingError, SafetensorError) as error:
        raise ConfigError(f"--speculative-token-map {path} holds more than ids: {error}") from error
    if ids.dim() != 1 or len(ids) == 0:
        raise ConfigError(f"--speculative-token-map {path} is no list of token ids")
    ids = ids.sort().values
    low, high, different = int(ids[0]), int(ids[-1]), len(set(ids.tolist()))
    if low < 0 or high >= vocab_size or different < len(ids):
        raise ConfigError(
            f"--speculative-token-map {path} has ids {low}..{high}, {different} different "
            f"ones of {len(ids)}; they must differ and lie in the target's vocabulary of "
            f"{vocab_size}. Take the map of this target"
        )
    return ids


def write_token_map(ids: Tensor, path: Path) -> None:
    """int64 [D], as JSON, safetensors or torch's file by the name's end. Raises ConfigError for
    another end."""
    if path.suffix == ".json":
        path.write_text(json.dumps(ids.tolist()), encoding="utf-8")
    elif path.suffix == ".safetensors":
        save_file({_TENSOR: ids.contiguous()}, path)
    elif path.suffix == ".pt":
        torch.save(ids.tolist(), path)
    else:
        raise ConfigError(f"{path}: the name must end in .json, .safetensors or .pt")


def _read(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt", device="cpu") as file:
            (name,) = file.keys()
            return file.get_tensor(name)
    return torch.load(path, map_location="cpu", weights_only=True)
