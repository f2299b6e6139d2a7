"""Families whose layers differ by the configuration's `layer_types`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from specengine.core.errors import ModelLoadError
from specengine.layers.layer_spec import LayerSpec

_TYPES = ("full_attention", "sliding_attention")


def layer_types(config: Any, known: Sequence[str] = _TYPES) -> list[str]:
    """One a layer; a configuration that states none has full attention in all. known: those of the
    family. Raises ModelLoadError for another."""
    told = getattr(config, "layer_types", None)
    types = list(told or ["full_attention"] * config.num_hidden_layers)
    for found in types:
        if found not in known:
            raise ModelLoadError(
                f"layer type {found!r} is not supported; known: {', '.join(known)}"
            )
    return types


def typed_windows(config: Any) -> list[int | None]:
    """Tokens that each layer sees, itself included; None is all."""
    types = layer_types(config)
    window = config.sliding_window if "sliding_attention" in types else None
    return [window if kind == "sliding_attention" else None for kind in types]


def with_rotary_kinds(specs: Sequence[LayerSpec], config: Any) -> list[LayerSpec]:
    """Each layer rotates by the rope_parameters of its type."""
    pairs = zip(specs, layer_types(config), strict=True)
    return [replace(spec, rotary_kind=kind) for spec, kind in pairs]


def with_rotation(specs: Sequence[LayerSpec], rotates: Iterable[object]) -> list[LayerSpec]:
    """rotates: one a layer; layers where it is false have no rotary embedding."""
    pairs = zip(specs, rotates, strict=True)
    return [replace(spec, has_rotary=bool(one)) for spec, one in pairs]
