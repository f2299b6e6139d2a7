"""The drafter that is examined, with the target that it drafts for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specengine.core.errors import ConfigError
from specengine.draft.dflash.describe import is_dflash
from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.draft.eagle.layer import parameter_name
from specengine.draft.loaded import draft_directory
from specengine.draft.mtp.checkpoint import find_layers
from specengine.draft.mtp.form import FORMS, MtpLayerName
from specengine.engine.factories import check_algorithm, drafters_with_models
from specengine.lab.doctor.block_rows import unjudged_drafts
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.forms import describe
from specengine.runner.loader.hf_directory import read_tensor_shapes
from specengine.runner.loader.loaded_model import LoadedModel

_MTP_PARTS = (
    "embedding_norm",
    "hidden_norm",
    "projection",
    "final_norm",
    "embed_tokens",
    "lm_head",
    "layer",
)


@dataclass(frozen=True)
class DrafterParts:
    """Parameter names of the parts in which mistakes occur. Empty where a family lacks the part.

    joined: weights whose columns are [embedding, state], by halves. joined_norms: of the two.
    attention: prefixes of the attention modules.
    """

    joined: tuple[str, ...] = ()
    joined_norms: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExaminedDrafter:
    """loaded: the target, with the configuration that the drafter is served with."""

    algorithm: str
    loaded: LoadedModel
    files: DraftFiles
    parts: DrafterParts

    @property
    def form(self) -> list[str]:
        """What its files are, a line a fact."""
        return describe(self.algorithm, self.files, self.hidden_size)

    @property
    def not_judged(self) -> list[str]:
        """What serving runs of it and no trial does, a line a fact."""
        num_steps = self.loaded.config.spec.num_steps
        if self.algorithm == "DFLASH" and num_steps is not None:
            return unjudged_drafts(num_steps)
        return []

    @property
    def hidden_size(self) -> int:
        return int(self.loaded.source.hf_config.hidden_size)

    @property
    def num_layers(self) -> int:
        return self.loaded.model.num_layers

    @property
    def vocab_size(self) -> int:
        return self.loaded.model.vocab_size

    @property
    def has_features(self) -> bool:
        """It continues the target's states."""
        return self.algorithm != "STANDALONE"


def find_algorithm(draft: str, asked: str | None) -> str:
    """The algorithm of these files, by their tensors and, for DFLASH, fields of config.json too.
    Raises ConfigError or ModelLoadError."""
    if asked is not None:
        if (name := check_algorithm(asked)) not in drafters_with_models():
            raise ConfigError(
                f"--speculative-algorithm {asked} drafts without a model: there is nothing to "
                f"examine; {', '.join(drafters_with_models())} have one"
            )
        return name
    directory = draft_directory(draft)
    names = list(read_tensor_shapes(directory))
    parameters = {parameter_name(name) for name in names}
    if "layers.0.hidden_norm.weight" in parameters:
        return "EAGLE3"
    if is_dflash(EagleCheckpoint.read(str(directory))):  # which has fc.weight as EAGLE does
        return "DFLASH"
    if "fc.weight" in parameters:
        return "EAGLE"
    return "MTP" if any(form.layer_ids(names) for form in FORMS) else "STANDALONE"


def read_drafter(algorithm: str, loaded: LoadedModel, draft: str) -> ExaminedDrafter:
    """Read the drafter's files. Raises ModelLoadError."""
    directory = draft_directory(draft)
    if algorithm == "MTP":
        layer = find_layers(directory, int(loaded.source.hf_config.hidden_size))[0]
        files = DraftFiles.read(directory, _mtp_parameters(layer), layer.owns)
        parts = DrafterParts(
            ("projection.weight",),
            ("embedding_norm.weight", "hidden_norm.weight"),
            ("layer.self_attn.",),
        )
        if layer.form.hidden_first:
            parts = replace(parts, joined_norms=parts.joined_norms[::-1])
        return ExaminedDrafter(algorithm, loaded, files, parts)
    parameter: Callable[[str], str] = parameter_name if algorithm != "STANDALONE" else str
    files = DraftFiles.read(directory, parameter, lambda name: True)
    return ExaminedDrafter(algorithm, loaded, files, _parts(algorithm, files))


def _parts(algorithm: str, files: DraftFiles) -> DrafterParts:
    attention = "layers.0.self_attn."
    if algorithm == "EAGLE3":
        joined = tuple(f"{attention}{name}_proj.weight" for name in "qkv")
        norms = ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight")
        return DrafterParts(joined, norms, (attention,))
    if algorithm == "EAGLE":
        return DrafterParts(("fc.weight",), (), (attention,))
    # Layers alone have attention: all of DFlash's, and all of a whole model's.
    parameters = map(files.parameter, files.tensors)
    names = [name for name in parameters if name.endswith("q_proj.weight")]
    return DrafterParts(attention=tuple(name.removesuffix("q_proj.weight") for name in names))


def _mtp_parameters(layer: MtpLayerName) -> Callable[[str], str]:
    def parameter(name: str) -> str:
        for part in _MTP_PARTS:
            template: str | None = getattr(layer.form, part)
            root = None if template is None else template.format(id=layer.layer_id) + "."
            if root is not None and name.startswith(root):
                return f"{part}.{name.removeprefix(root)}"
        return name

    return parameter
