"""EAGLE-3 drafts from SGLang's and SpecForge's layout to that of speculators and vLLM, and back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.eagle.convert_config import (
    Eagle3Config,
    is_speculators,
    read_config,
    sglang_config,
    speculators_config,
)
from specengine.draft.eagle.convert_proof import Proof, TargetMeasures, prove
from specengine.draft.eagle.convert_tensors import (
    check_biases,
    check_tensors,
    read_tensors,
    refuse_biases,
    sglang_tensors,
    speculators_tensors,
    target_head,
    with_head,
)
from specengine.draft.loaded import draft_directory
from specengine.runner.loader.hf_directory import iterate_safetensors

LAYOUTS = ("sglang", "speculators")


@dataclass(frozen=True)
class Conversion:
    """to: one of LAYOUTS. target and its architectures: speculators writes them down, for vLLM to
    serve the draft with. num_tokens: drafted a round, unless vLLM is told otherwise."""

    to: str | None = None  # None: the other one
    target: str | None = None
    target_architectures: tuple[str, ...] = ()
    num_tokens: int = 3
    head_from: Path | None = None  # a target, for drafts that use rows of its head
    force: bool = False


@dataclass(frozen=True)
class Converted:
    """left_out: keys of config.json that say nothing of what the draft computes."""

    to: str
    left_out: tuple[str, ...]
    proof: Proof


def convert(source: str, destination: Path, conversion: Conversion) -> Converted:
    """source: a directory or hub id. The destination is there only once the proof holds, whole.
    Raises ConfigError or ModelLoadError, and then leaves everything as it was."""
    _check_free(destination, conversion.force)
    directory = draft_directory(source)
    raw = _read_json(directory / "config.json")
    to = conversion.to or ("sglang" if is_speculators(raw) else "speculators")
    if (to == "speculators") == is_speculators(raw):
        raise ConfigError(f"{source} is in the layout of {to} already")
    config = read_config(raw, source)
    tensors = read_tensors(iterate_safetensors(directory), source)
    measures = _measures(tensors, config)
    if conversion.head_from is not None and "lm_head.weight" not in tensors:
        head = target_head(conversion.head_from, config)
        tensors = with_head(tensors, config, head, source)
        measures = replace(measures, head=head)
    check_tensors(tensors, config, source)
    if to == "sglang":
        refuse_biases(tensors, source)
        written, renamed = sglang_config(config, source), sglang_tensors(tensors)
    else:
        check_biases(tensors, config, source)
        written = _speculators_config(config, conversion)
        renamed = speculators_tensors(tensors, config, source)
    with _whole_or_not_at_all(destination) as folder:
        _write(folder, written, renamed)
        proof = prove(directory, folder, measures)
    return Converted(to, config.left_out, proof)


def _speculators_config(config: Eagle3Config, conversion: Conversion) -> dict[str, Any]:
    if conversion.target is None:
        raise ConfigError(
            "a draft in the layout of speculators names its target, and this one does not say "
            "which it is; name it with --target"
        )
    architectures = list(conversion.target_architectures)
    return speculators_config(config, conversion.target, architectures, conversion.num_tokens)


def _measures(tensors: dict[str, Tensor], config: Eagle3Config) -> TargetMeasures:
    """Enough layers for those that the draft reads, or for the usual ones where it does not say."""
    layers = config.feature_layers
    if "fc.weight" not in tensors:
        raise ModelLoadError("the draft has no fc.weight; it is not one of EAGLE-3")
    width = tensors["fc.weight"].shape[1]
    return TargetMeasures(
        hidden_size=width // len(layers or (0, 0, 0)),
        vocab_size=config.vocab_size,
        num_layers=1 + max(layers or (31,)),
    )


def _check_free(destination: Path, force: bool) -> None:
    if destination.is_dir() and (force or not any(destination.iterdir())):
        return
    if destination.exists():
        raise ConfigError(f"{destination} is there already; --force replaces a directory")


@contextmanager
def _whole_or_not_at_all(destination: Path) -> Iterator[Path]:
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


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return raw
