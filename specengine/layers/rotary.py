"""Rotary position embeddings: the table of cosines and sines, for every scaling that is known.

RoFormer (Su et al. 2021); linear position interpolation (Chen et al. 2023); YaRN (Peng et al. 2023,
sections 3.2 to 3.4); LongRoPE (Ding et al. 2024); llama3 as in Llama 3.1; "dynamic" as in
transformers (NTK-aware), and with a fixed alpha as in Hunyuan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.layers.module import Module

RopeParameters = dict[str, Any]


class RotaryEmbedding(Module):
    """`cos_sin_cache`: float32 [max_positions, rotary_dim], cosines then sines, each half for the
    pair (i, i + rotary_dim / 2). YaRN's and LongRoPE's attention factors are already in it."""

    cos_sin_cache: Tensor

    def __init__(self, rotary_dim: int, max_positions: int, parameters: RopeParameters) -> None:
        super().__init__()
        inv_freq, attention_factor = rope_frequencies(rotary_dim, max_positions, parameters)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor
        self.register_buffer("cos_sin_cache", table, persistent=False)

    @classmethod
    def from_config(
        cls,
        config: Any,
        kind: str | None = None,
        fraction: float = 1.0,
        head_dim: int | None = None,
    ) -> RotaryEmbedding:
        """For a Hugging Face configuration, in today's form or the older one. kind: a layer type,
        where types have tables of their own. fraction: of a head that is rotated. head_dim: of
        what is rotated, where it is not the head that the configuration states. Raises
        ModelLoadError where the configuration states another than the whole, and the caller does
        not."""
        if fraction == 1.0 and rotary_fraction(config) != 1.0:
            raise ModelLoadError(
                f"partial_rotary_factor {rotary_fraction(config)}: rotating part of a head is not "
                "supported by this family"
            )
        dim = int((head_dim or config_head_dim(config)) * fraction)
        return cls(dim, config.max_position_embeddings, rope_parameters(config, kind))


def config_head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim or config.hidden_size // config.num_attention_heads)


def rope_parameters(config: Any, kind: str | None = None) -> RopeParameters:
    """`rope_parameters` of a configuration; or, older, `rope_scaling` and `rope_theta`. kind: the
    layer type whose they are, where types differ; unknown raises ModelLoadError. With them goes
    `context`: the tokens that requests may have, where the loader set `served_context`; and
    `made_for`: max_position_embeddings of config.json, where the loader raised that."""
    found = getattr(config, "rope_parameters", None)
    if found is None:
        found = getattr(config, "rope_scaling", None) or {}
    if _has_kinds(found):
        if kind not in found:
            known = ", ".join(found)
            raise ModelLoadError(f"rope_parameters differ by layer type ({known}): {kind} is none")
        found = found[kind]
    found = _stated(config) | {key: value for key, value in found.items() if value is not None}
    parameters = {"rope_theta": getattr(config, "rope_theta", 10000.0)} | dict(found)
    parameters["rope_type"] = parameters.get("rope_type", parameters.get("type", "default"))
    return parameters


def rope_kinds(config: Any) -> tuple[str | None, ...]:
    """Layer types that have rope parameters of their own; None alone where all have the same."""
    found = getattr(config, "rope_parameters", None) or {}
    return tuple(found) if _has_kinds(found) else (None,)


def longest_context(config: Any) -> int:
    """Tokens that requests may be given: max_position_embeddings, and of the types "linear" and
    "dynamic", whose configurations do not say whether that is stretched already, `factor` times as
    many. Raises ModelLoadError for a factor that is no finite number."""
    positions = int(config.max_position_embeddings)
    if rope_kinds(config) != (None,):
        return positions
    found = rope_parameters(config)
    if found["rope_type"] not in ("linear", "dynamic") or found.get("alpha"):
        return positions
    factor = found.get("factor") or 1.0
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        raise ModelLoadError(f"rope_parameters: factor {factor!r} is no finite number; correct it")
    return int(positions * max(factor, 1.0))


def rotary_fraction(config: Any) -> float:
    """The part of a head that is rotated. Raises ModelLoadError where layer types differ in it."""
    found = getattr(config, "rope_parameters", None) or {}
    tables = list(found.values()) if _has_kinds(found) else [found]
    older = getattr(config, "partial_rotary_factor", None)
    fractions = {table.get("partial_rotary_factor") or older or 1.0 for table in tables}
    if len(fractions) > 1:
        raise ModelLoadError("partial_rotary_factor differs by layer type: not supported")
    return float(fractions.pop())


def _has_kinds(parameters: RopeParameters) -> bool:
    return bool(parameters) and all(isinstance(one, dict) for one in parameters.values())


def _stated(config: Any) -> RopeParameters:
    """What is outside the rope parameters and belongs to them."""
    original = getattr(config, "original_max_position_embeddings", None)
    context, made_for = (getattr(config, one, None) for one in ("served_context", "made_for"))
    stated = {
        "original_max_position_embeddings": original,
        "context": context,
        "made_for": made_for,
    }
    return {key: value for key, value in stated.items() if value is not None}


def rope_frequencies(
    rotary_dim: int, max_positions: int, parameters: RopeParameters
) -> tuple[Tensor, float]:
    """Angle a position of each pair, float32 [rotary_dim / 2], and the factor on cos and sin.

    Raises ModelLoadError for a scaling that is not known or lacks a parameter.
    """
    kind = parameters["rope_type"]
    if kind not in _SCALINGS:
        raise ModelLoadError(f"rope_type {kind!r} is not supported; known: {', '.join(_SCALINGS)}")
    try:
        return _SCALINGS[kind](rotary_dim, {"max_positions": max_positions} | parameters)
    except KeyError as error:
        raise ModelLoadError(f"rope_parameters of type {kind!r} lack {error}") from error


def _base_frequencies(dim: int, p: RopeParameters) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / torch.pow(float(p["rope_theta"]), exponents)


def _default(dim: int, p: RopeParameters) -> tuple[Tensor, float]:
    return _base_frequencies(dim, p), 1.0


def _linear(dim: int, p: RopeParameters) -> tuple[Tensor, float]:
    return _base_frequencies(dim, p) / p["factor"], 1.0


def dynamic_base(dim: int, p: RopeParameters) -> float:
    """The base of type "dynamic", of dim numbers of a head. It grows where requests may be longer
    than max_position_embeddings, to what a text of all that context has; transformers chooses by
    each text, which KV that is kept does not allow. As there, original_max_position_embeddings is
    not read. A fixed alpha in place of a factor (Hunyuan; read in any family) stretches it so that
    the slowest pair turns 1 / alpha as fast."""
    base = float(p["rope_theta"])
    if p.get("alpha"):
        return base * float(p["alpha"] ** (dim / (dim - 2)))
    made_for = p.get("made_for") or p["max_positions"]
    served = p.get("context") or made_for
    if served <= made_for:
        return base
    stretch = p["factor"] * served / made_for - (p["factor"] - 1)
    return base * float(stretch ** (dim / (dim - 2)))


def _dynamic(dim: int, p: RopeParameters) -> tuple[Tensor, float]:
    return _default(dim, p | {"rope_theta": dynamic_base(dim, p)})


def _llama3(dim: int, p: RopeParameters) -> tuple[Tensor, float]:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    inv_freq = _base_frequencies(dim, p)
    turns = p["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * keep + inv_freq / p["factor"] * (1 - keep), 1.0


def _yarn(dim: int, p: RopeParameters) -> tuple[Tensor, float]:
    original = p["original_max_position_embeddings"]
    factor = p["factor"] or p["max_positions"] / original

    def dimension(turns: float) -> float:
        """The pair that makes this many turns over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(p["rope_theta"]))

    first = dimension(p.get("beta_fast") or 32)
    last = dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = last - first or 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - first) / span).clamp(0.0, 1.0)
    inv_freq = _base_frequencies(dim, p)
    return inv_freq / factor * slow + inv_freq * (1 - slow), _yarn_attention_factor(factor, p)


def _yarn_attention_factor(factor: float, p: RopeParameters) -> float:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if p.get("mscale") and p.get("mscale_all_dim"):
        return magnitude(p["mscale"]) / magnitude(p["mscale_all_dim"])
    return magnitude(1.0)


def _longrope(dim: int, p: RopeParameters) -> tuple[Tensor, float]:
    """Each pair slowed by a divisor of its own. Which of two sets, the context decides that
    requests may have, once for all: what one set rotated, queries of the other cannot read.
    GGUF files keep llama3's scaling as one set under both names."""
    original = p["original_max_position_embeddings"]
    is_long = (p.get("context") or p["max_positions"]) > original
    name = "long_factor" if is_long else "short_factor"
    divisors = torch.tensor(p[name], dtype=torch.float32)
    if divisors.numel() != dim // 2:
        raise ModelLoadError(f"{name} has {divisors.numel()} values, needs {dim // 2}")
    return _base_frequencies(dim, p) / divisors, _longrope_attention_factor(original, p)


def _longrope_attention_factor(original: int, p: RopeParameters) -> float:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    factor = p.get("factor") or p["max_positions"] / original
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))


_SCALINGS: dict[str, Callable[[int, RopeParameters], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "dynamic": _dynamic,
    # One angle each for time, height and width, which are equal in text.
    "mrope": _default,
}
