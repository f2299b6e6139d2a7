"""EAGLE-3 drafts from SGLang's and SpecForge's layout to that of speculators and vLLM, and back;
and pickled drafts of EAGLE and EAGLE-3 to safetensors."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.eagle.checkpoint import read_json
from specengine.draft.eagle.convert_config import (
    Eagle3Config,
    is_speculators,
    read_config,
    sglang_config,
    speculators_config,
)
from specengine.draft.eagle.convert_files import (
    check_free,
    whole_or_not_at_all,
    write_draft,
)
from specengine.draft.eagle.convert_pickled import is_pickled, rewrite
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

    to: str | None = None  # None: the other one; of pickled drafts their own, as safetensors
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


def pickled_in_place(source: str, to: str | None) -> Path | None:
    """The draft's directory, where its weights are pickled and nothing else of it is to change."""
    directory = draft_directory(source, pickled=True)
    if not is_pickled(directory):
        return None
    own = "speculators" if is_speculators(read_json(directory / "config.json")) else "sglang"
    return directory if to in (None, own) else None


def convert(source: str, destination: Path, conversion: Conversion) -> Converted:
    """source: a directory or hub id. The destination is there only once the proof holds, whole.
    Raises ConfigError or ModelLoadError, and then leaves everything as it was."""
    check_free(destination, conversion.force)
    directory = draft_directory(source, pickled=True)
    if not is_pickled(directory):
        return _convert(source, directory, destination, conversion)
    with tempfile.TemporaryDirectory() as folder:
        unpickled = Path(folder, "draft")
        rewrite(directory, unpickled, force=False)
        return _convert(source, unpickled, destination, conversion)


def _convert(source: str, directory: Path, destination: Path, conversion: Conversion) -> Converted:
    raw = read_json(directory / "config.json")
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
    with whole_or_not_at_all(destination) as folder:
        write_draft(folder, written, renamed)
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
