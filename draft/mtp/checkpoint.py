"""Finding MTP layers in a checkpoint: the target's own directory, or another."""

from __future__ import annotations

from pathlib import Path

from specengine.core.errors import ModelLoadError
from specengine.draft.mtp.form import FORMS, MtpForm, MtpLayerName
from specengine.runner.loader.hf_directory import read_tensor_shapes

Shapes = dict[str, list[int]]


def find_layers(directory: Path, hidden_size: int) -> tuple[MtpLayerName, ...]:
    """The MTP layers of a directory, the one first that predicts one token further than the target.
    Raises ModelLoadError where there is none, or none that fits a target of this hidden size."""
    shapes = read_tensor_shapes(directory)
    form, ids = _form_of(list(shapes), directory)
    layers = tuple(_layer(form, layer_id, shapes) for layer_id in ids)
    for layer in layers:
        _check_size(layer, shapes, hidden_size, directory)
    return layers


def _form_of(names: list[str], directory: Path) -> tuple[MtpForm, list[int]]:
    for form in FORMS:
        ids = form.layer_ids(names)
        if ids:
            return form, ids
    wanted = ", ".join(f"{form.anchor.replace('{id}', '*')} ({form.name})" for form in FORMS)
    raise ModelLoadError(
        f"{directory} holds no MTP layer; looked for {wanted}. Name a directory that has one with "
        "--speculative-draft-model-path, or take another --speculative-algorithm"
    )


def _layer(form: MtpForm, layer_id: int, shapes: Shapes) -> MtpLayerName:
    def has(template: str | None) -> bool:
        return template is not None and f"{template.format(id=layer_id)}.weight" in shapes

    return MtpLayerName(form, layer_id, has(form.embed_tokens), has(form.lm_head))


def _check_size(layer: MtpLayerName, shapes: Shapes, hidden_size: int, directory: Path) -> None:
    name = layer.tensor("projection.weight")
    found = shapes.get(name)
    if found is not None and found != [hidden_size, 2 * hidden_size]:
        raise ModelLoadError(
            f"{directory}: {name} is {found}, which joins states of hidden_size {found[0]}; the "
            f"target's hidden_size is {hidden_size}. Name the MTP layers of this target with "
            "--speculative-draft-model-path"
        )
