"""What routing decides, and what experts multiply with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SCORES = ("softmax", "sigmoid")  # of a router's logits
ACTIVATIONS = ("silu", "clamped")


@dataclass(frozen=True)
class Routing:
    """How a row chooses experts. Fields are those of layers.layer_spec.ExpertsSpec."""

    num_chosen: int
    scores: str = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_best: int = 2


@dataclass(frozen=True)
class Router:
    """The product that gives logits [T, E]."""

    weight: Tensor  # [E, H]
    bias: Tensor | None = None  # [E]
    correction: Tensor | None = None  # float32 [E], added to scores when choosing


@dataclass(frozen=True)
class Chosen:
    """K experts a row, the best first, of equal ones the first. No row has one twice."""

    ids_TK: Tensor  # int32
    weights_TK: Tensor  # float32


@dataclass(frozen=True)
class Activation:
    """``silu(gate) * up``, or "clamped" (gpt-oss): ``g * sigmoid(alpha * g) * (u + 1)`` with
    ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``."""

    name: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class ExpertWeights:
    """E experts; I is the intermediate size of each."""

    gate_up: Tensor  # [E, 2 I, H], gate rows before up rows
    down: Tensor  # [E, H, I]
    gate_up_bias: Tensor | None = None  # [E, 2 I]
    down_bias: Tensor | None = None  # [E, H]
    activation: Activation = Activation()
    weighs_input: bool = False  # the weight multiplies what an expert reads, not what it gives
