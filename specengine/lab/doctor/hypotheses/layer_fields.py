"""Where the configuration of a draft says which layers of the target it reads."""

from __future__ import annotations

from typing import Any, Protocol

from specengine.core.errors import ModelLoadError
from specengine.draft.dflash.describe import named_layers
from specengine.draft.eagle.checkpoint import EagleCheckpoint
from specengine.lab.doctor.files import DraftFiles

_EAGLE = "eagle_aux_hidden_state_layer_ids"
_OUTPUTS, _INPUTS = "target_layer_ids", "aux_hidden_state_layer_ids"
Layers = tuple[int, ...]


class LayerFields(Protocol):
    """Layers are counted by their outputs from 0, whatever the field counts by.

    fewer, more: what a shift of all ids by -1 or by 1 would mean.
    """

    fewer: str
    more: str

    def stated(self, files: DraftFiles, num_layers: int) -> Layers:
        """What the configuration says, possible or not; () where it says nothing."""
        ...

    def usual(self, num_layers: int) -> Layers:
        """() where there are no usual ones."""
        ...

    def with_layers(self, files: DraftFiles, layers: Layers) -> DraftFiles:
        """In the layout that the file has."""
        ...

    def remedy(self, files: DraftFiles, layers: Layers) -> str: ...


class EagleFields:
    """EAGLE-3's, which a file may have in two layouts at once."""

    fewer = "ids of vLLM's and speculators' counting under SGLang's key"
    more = "ids of SGLang's counting under vLLM's and speculators' key"

    def stated(self, files: DraftFiles, num_layers: int) -> Layers:
        checkpoint = EagleCheckpoint(files.directory.name, files.raw)
        try:
            return checkpoint.feature_layers(num_layers)
        except ModelLoadError:
            return checkpoint.named_layers() or ()

    def usual(self, num_layers: int) -> Layers:
        return (1, num_layers // 2 - 1, num_layers - 4)

    def with_layers(self, files: DraftFiles, layers: Layers) -> DraftFiles:
        edited: dict[str, Any] = {}
        if files.raw.get(_EAGLE) is not None:
            edited[_EAGLE] = [layer + 1 for layer in layers]
        if not self._counts_as_vllm(files):
            nested = files.raw.get("eagle_config") or {}
            edited["eagle_config"] = {**nested, _EAGLE: list(layers)}
        return files.with_config(**edited)

    def remedy(self, files: DraftFiles, layers: Layers) -> str:
        nested = f"eagle_config.{_EAGLE} to {list(layers)}"
        if files.raw.get(_EAGLE) is None:
            return nested
        read = [layer + 1 for layer in layers]
        shared = f"{_EAGLE}, which counts inputs as vLLM does, to {read}"
        return shared if self._counts_as_vllm(files) else f"{nested}, and {shared}"

    def _counts_as_vllm(self, files: DraftFiles) -> bool:
        is_nested = _EAGLE in (files.raw.get("eagle_config") or {})
        return not is_nested and files.raw.get(_EAGLE) is not None


class DFlashFields:
    """DFlash's: z-lab's target_layer_ids, or else what speculators writes."""

    fewer = f"ids that count by what layers read, as speculators' do, under {_OUTPUTS}"
    more = f"ids that count by what layers give, as z-lab's do, under {_INPUTS}"

    def stated(self, files: DraftFiles, num_layers: int) -> Layers:
        return named_layers(EagleCheckpoint(files.directory.name, files.raw)) or ()

    def usual(self, num_layers: int) -> Layers:
        return ()

    def with_layers(self, files: DraftFiles, layers: Layers) -> DraftFiles:
        if self._counts_inputs(files):
            return files.with_config(**{_INPUTS: [layer + 1 for layer in layers]})
        nested = files.raw.get("dflash_config")
        if nested is None:
            return files.with_config(**{_OUTPUTS: list(layers)})
        return files.with_config(dflash_config={**nested, _OUTPUTS: list(layers)})

    def remedy(self, files: DraftFiles, layers: Layers) -> str:
        if self._counts_inputs(files):
            read = [layer + 1 for layer in layers]
            return f"{_INPUTS}, which counts by what layers read, to {read}"
        is_nested = files.raw.get("dflash_config") is not None
        return f"{'dflash_config.' * is_nested}{_OUTPUTS} to {list(layers)}"

    def _counts_inputs(self, files: DraftFiles) -> bool:
        nested = files.raw.get("dflash_config") or {}
        names_outputs = _OUTPUTS in nested or _OUTPUTS in files.raw
        return not names_outputs and files.raw.get(_INPUTS) is not None


FIELDS: dict[str, LayerFields] = {"EAGLE3": EagleFields(), "DFLASH": DFlashFields()}
