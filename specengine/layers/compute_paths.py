"""What each way of computing a layer takes of its description: every other value is refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields

import torch

from specengine.core.errors import ModelLoadError
from specengine.layers.layer_spec import HeadSpec, LayerSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComputePath:
    """One way to run a layer or a head. computes: fields of its description that may have any
    value; every other field that has a default must be at it."""

    name: str
    computes: frozenset[str]

    def refusal(self, specs: Sequence[LayerSpec | HeadSpec]) -> str | None:
        """What these have that the path does not compute; None where it takes them."""
        found = {
            f"{field.name} {value!r}"
            for spec in specs
            for field in fields(spec)
            if field.default is not MISSING and field.name not in self.computes
            if (value := getattr(spec, field.name)) != field.default
        }
        return ", ".join(sorted(found)) or None

    def takes(self, *specs: LayerSpec | HeadSpec) -> bool:
        return self.refusal(specs) is None

    def require(self, spec: LayerSpec | HeadSpec) -> None:
        """Raises ModelLoadError, naming what the path does not compute."""
        refusal = self.refusal([spec])
        if refusal is not None:
            raise ModelLoadError(f"{refusal} is not supported by {self.name}")


# Computed by SelfAttention.attend and the attention backends, whatever runs around them.
_ATTENTION = frozenset(
    {
        "qk_norm",
        "qk_norm_whole",
        "qk_norm_by_head",
        "qk_norm_rotated",
        "sliding_window",
        "attention_chunk",
        "attention_multiplier",
        "attention_softcap",
        "attention_sinks",
        "query_temperature",
        "has_rotary",
        "rotary_kind",
        "rotary_fraction",
        "attention_gate",
    }
)
# Folded into the stream and the epsilon of its norms.
_FOLDED = frozenset({"embedding_multiplier", "residual_multiplier"})
_BIASES = frozenset({"qkv_bias", "o_bias", "mlp_bias"})

# Computed by modules that are made by the description: norms and feed-forward.
_MODULES = frozenset({"activation", "gated_mlp", "norm", "norm_offset", "norm_places"})

_RANKS = frozenset({"tp_size"})  # by RowParallelLinear
_EXPERTS = frozenset({"experts"})
_STATE = frozenset({"gated_delta"})
_LATENT = frozenset({"latent"})  # by LatentAttention.attend
_SHARED = _ATTENTION | _FOLDED | _LATENT

PLAIN = ComputePath("decoder layers", _SHARED | _BIASES | _MODULES | _RANKS | _EXPERTS | _STATE)
COMPILED = ComputePath("compiled layers", _SHARED | _BIASES | _MODULES | _EXPERTS)
FEW_ROWS = ComputePath("few_row", _SHARED | _RANKS | _EXPERTS | {"qkv_bias", "o_bias"})
LAYER_TAIL = ComputePath("layer_tail", _ATTENTION | _FOLDED | {"qkv_bias"})
WHOLE_STACK = ComputePath("decoder_stack", _FOLDED | {"attention_multiplier"})
SPLIT_PREFILL = ComputePath("split prefill", PLAIN.computes)
# What LatentAttention itself computes.
LATENT_ATTENTION = ComputePath(
    "latent attention",
    (PLAIN.computes - _ATTENTION - _STATE) | {"attention_multiplier", "rotary_kind"},
)
FAST_PATHS = (COMPILED, FEW_ROWS, LAYER_TAIL, WHOLE_STACK, SPLIT_PREFILL)
# A drafter's layer, whose stream starts with something else than the target's embedding.
DRAFT_LAYER = ComputePath("draft layers", _ATTENTION | _BIASES | _RANKS)
MTP_LAYER = ComputePath("MTP layers", DRAFT_LAYER.computes | _EXPERTS | _LATENT | {"norm_offset"})
TRAINED_LAYER = ComputePath("training", _BIASES | {"qk_norm"})

HEAD_LOGITS = ComputePath("the head", frozenset({"logits_multiplier", "logits_softcap"}))
# The order of logits stays.
HEAD_BEST = ComputePath("head_best", frozenset({"logits_multiplier", "logits_softcap"}))
HEAD_TOP = ComputePath("head_topk", frozenset())
FAST_HEADS = (HEAD_BEST, HEAD_TOP)


def log_refusals(
    paths: Sequence[ComputePath], specs: Sequence[LayerSpec | HeadSpec], device: torch.device
) -> None:
    """Say which of the fast paths a model does without, and why. They exist on GPUs alone."""
    for path in paths if device.type == "cuda" else ():
        refusal = path.refusal(specs)
        if refusal is not None:
            logger.info("no fast path %s: it does not compute %s", path.name, refusal)
