"""Rotary positions: the order of the rows of q and k, and the frequencies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from specengine.lab.doctor.examined_drafter import ExaminedDrafter
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.hypothesis import Hypothesis, Trial
from specengine.layers.rotary import rope_kinds, rope_parameters
from specengine.runner.loader.gguf_weights import unpermute

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def hypotheses(drafter: ExaminedDrafter, trial: Trial) -> Iterator[Hypothesis]:
    head_dim = _head_dim(drafter, trial.files)
    for undo, claim, remedy in (
        (True, "lie in pairs (2i, 2i + 1), as GGUF files keep them", "unpermute"),
        (False, "were unpermuted once too often", "permute"),
    ):
        yield Hypothesis(
            "q/k rows",
            f"rows of q_proj and k_proj {claim}",
            f"q_proj and k_proj: {remedy} the rows of each head (--write-fixed does it)",
            partial(permuted, prefixes=drafter.parts.attention, head_dim=head_dim, undo=undo),
        )
    if drafter.algorithm != "MTP":  # whose layers are of the target's configuration
        yield from rope_hypotheses(drafter, trial.files)


def permuted(
    files: DraftFiles, prefixes: tuple[str, ...], head_dim: int, *, undo: bool
) -> DraftFiles:
    """Rows (0, 1), (2, 3), ... of each head become halves, or the reverse."""
    edited = {}
    for prefix in prefixes:
        for name in ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"):
            rows = files.get(prefix + name)
            if rows is not None:
                edited[prefix + name] = _reorder(rows, len(rows) // head_dim, undo=undo)
    return files.with_tensors(edited)


def _reorder(rows: Tensor, num_heads: int, *, undo: bool) -> Tensor:
    if undo:
        return unpermute(rows, num_heads)
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def _head_dim(drafter: ExaminedDrafter, files: DraftFiles) -> int:
    config = drafter.loaded.source.hf_config.to_dict()
    section = config if drafter.algorithm == "MTP" else files.layer_section
    found = section.get("head_dim")
    return int(found or section["hidden_size"] // section["num_attention_heads"])


def rope_hypotheses(drafter: ExaminedDrafter, files: DraftFiles) -> Iterator[Hypothesis]:
    """Those of the target; one hypothesis a table, where its layers rotate by several."""
    config = drafter.loaded.source.hf_config
    own = rope_parameters(SimpleNamespace(**files.layer_section))
    for kind in rope_kinds(config):
        if rope_parameters(config, kind) == own:
            continue
        theirs = _rope_fields(config, kind)
        told = [f"{name} to {value}" for name, value in theirs.items() if value is not None]
        of_kind = "" if kind is None else f" of its {kind} layers"
        yield Hypothesis(
            f"rotary frequencies{of_kind}",
            f"trained with the target's rotary frequencies{of_kind}, not with those of its "
            "configuration",
            f"config.json: set {', '.join(told)}",
            partial(DraftFiles.with_layer_config, **theirs),
        )


def _rope_fields(config: Any, kind: str | None) -> dict[str, Any]:
    """Fields of a draft's config.json."""
    fields = config.to_dict()
    if kind is None:
        return {name: fields.get(name) for name in _ROPE}
    return dict.fromkeys(_ROPE) | {"rope_parameters": fields["rope_parameters"][kind]}
