"""The router and the experts of a mixture (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from specengine.core.parallel import Cut, communicator, even_cut
from specengine.kernels.experts import experts as op
from specengine.kernels.experts import experts_ref, route_ref
from specengine.kernels.experts.packed import OneExpert, PackedExperts, PackedExpertWeights
from specengine.kernels.experts.route import route
from specengine.kernels.experts.types import Activation, Chosen, ExpertWeights, Routing
from specengine.kernels.experts.types import Router as RouterWeights
from specengine.layers.layer_spec import ExpertsSpec
from specengine.layers.linear import IncomingWeight, Linear, LinearKernel, weight_device
from specengine.layers.module import Module, empty_parameter

# Weight [out, in] and bias -> what multiplies with them on this machine, or None.
MakeKernel = Callable[[Tensor, Tensor | None], LinearKernel | None]


class Router(Linear):
    """Logits of experts. A logit in few bits would choose other experts, so that it stays whole."""

    keeps_precision = True

    def __init__(self, hidden_size: int, spec: ExpertsSpec) -> None:
        super().__init__(hidden_size, spec.num_experts, spec.router_bias)
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(spec.num_experts, dtype=torch.float32), requires_grad=False)
            if spec.has_correction
            else None
        )
        self.routing = Routing(
            spec.num_chosen,
            spec.scores,
            spec.normalised,
            spec.scaling,
            spec.num_groups,
            spec.num_chosen_groups,
            spec.group_best,
        )

    def choose(self, x: Tensor) -> Chosen:
        """[T, hidden_size] -> experts and weights of each row."""
        correction = self.e_score_correction_bias
        if self.kernel is not None:
            return route_ref.choose(self.kernel(x).float(), correction, self.routing)
        return route(x, RouterWeights(self.plain, self.bias, correction), self.routing)


class IncomingExpert(IncomingWeight):
    """What a quantised checkpoint has for one product of one expert, where its file is: a card need
    not hold experts that are not read yet."""

    def __init__(self, own_shape: Sequence[int], cut: Cut) -> None:
        """own_shape: of this rank's part, `cut`."""
        super().__init__(torch.device("cpu"))
        self.cut = cut
        shape = list(own_shape)
        shape[cut.dim] = cut.whole
        self.whole_shape = shape[0], shape[1]  # of the checkpoint's weight
        self.draw: Callable[[], dict[str, Tensor]] | None = None  # random tensors in their place


class Experts(Module):
    """The experts' weights, all in one tensor a product until `pack` cuts them up, or packed as
    their checkpoint has them. A rank has some of the I intermediate features of each expert, and
    gives its part of the output, which SparseMLP adds up; rank 0's part has the bias."""

    gate_up: Tensor | None  # [E, 2 I, H]
    down: Tensor | None  # [E, H, I]

    def __init__(self, hidden_size: int, spec: ExpertsSpec) -> None:
        super().__init__()
        self.part = even_cut(spec.intermediate_size, "intermediate features of experts")
        self.is_first = communicator().rank == 0
        count, inner, bias = spec.num_experts, self.part.size, spec.expert_bias
        self.count, self.device = count, torch.empty(0).device
        self.num_chosen = spec.num_chosen  # of each row
        place = weight_device()
        self.gate_up = empty_parameter(count, 2 * inner, hidden_size, device=place)
        self.down = empty_parameter(count, hidden_size, inner, device=place)
        self.gate_up_bias = empty_parameter(count, 2 * inner) if bias else None
        self.down_bias = empty_parameter(count, hidden_size) if bias else None
        self.kernels: list[tuple[LinearKernel, LinearKernel]] | None = None
        self.packed: PackedExpertWeights | None = None
        self.incoming: dict[str, IncomingExpert] | None = None  # while a checkpoint is read
        self.weighs_input = spec.weighs_input
        self.activation = Activation(spec.activation, spec.activation_alpha, spec.activation_limit)

    def forward(self, x: Tensor, chosen: Chosen, into: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], or float32 [P, T, H], the parts of the sum, for RMSNorm.add. into: of
        `room`, for the parts."""
        kernels = self.kernels
        if kernels is None:
            return op.experts(x, chosen, self.packed or self.weights, into)
        return experts_ref.by_expert(
            x,
            chosen,
            lambda expert, rows: kernels[expert][0](rows),
            lambda expert, rows: kernels[expert][1](rows),
            self.activation,
            self.weighs_input,
        )

    def room(self, x: Tensor) -> Tensor | None:
        """float32 [P + 1, T, H]: for the parts and one more. None: `forward` gives the sum."""
        if self.kernels is not None:
            return None
        return op.room_for_parts(x, self.num_chosen, self.packed or self.weights, 1)

    @property
    def weights(self) -> ExpertWeights:
        """The weights of experts that have not been packed."""
        assert self.gate_up is not None, "the weights were packed"
        assert self.down is not None
        biases = self.gate_up_bias, self.down_bias
        return ExpertWeights(self.gate_up, self.down, *biases, self.activation, self.weighs_input)

    @property
    def own_weights(self) -> int:
        """As Module has it. What is packed is no parameter."""
        if self.packed is None:
            return super().own_weights
        return sum(math.prod(one.shape) for one in (self.packed.gate_up, self.packed.down))

    @property
    def weights_each(self) -> list[Tensor | LinearKernel | OneExpert]:
        """What the first expert multiplies with."""
        if self.kernels is not None:
            return [*self.kernels[0]]
        if self.packed is not None:
            return [self.packed.gate_up.one(0), self.packed.down.one(0)]
        return [self.weights.gate_up[0], self.weights.down[0]]

    def named_shards(self) -> Iterator[tuple[str, Tensor, Cut]]:
        """(name of an expert's own tensor, its place here, which part of the tensor that is)."""
        weights, part = self.weights, self.part
        rows, columns, biases = part.along(0), part.along(1), self._biases(weights.down.shape[1])
        kinds = [("weight", weights.gate_up, weights.down, columns)]
        if weights.gate_up_bias is not None and weights.down_bias is not None:
            kinds.append(("bias", weights.gate_up_bias, weights.down_bias, biases))
        for kind, gate_up, down, cut in kinds:
            for expert in range(len(gate_up)):
                gate, up = gate_up[expert].chunk(2)
                yield f"{expert}.gate_proj.{kind}", gate, rows
                yield f"{expert}.up_proj.{kind}", up, rows
                yield f"{expert}.down_proj.{kind}", down[expert], cut

    def whole_view(self, kind: str, parameter: Tensor) -> tuple[Tensor, Cut]:
        """A parameter, and which part this is of the one that a rank alone would have."""
        count = len(parameter)
        if kind == "down_bias":
            return parameter, self._biases(count)
        if kind.startswith("gate_up"):
            parameter = parameter.view(count, 2, self.part.size, *parameter.shape[2:])
        return parameter, self.part.along(2)

    def _biases(self, count: int) -> Cut:
        return Cut(0, 0, count if self.is_first else 0, count)

    def open(self) -> None:
        """Collect from now on what a quantised checkpoint has for each weight."""
        self.incoming = {
            name: IncomingExpert(place.shape, cut)
            for name, place, cut in self.named_shards()
            if name.endswith(".weight")
        }

    def allocate(self) -> dict[str, Tensor]:
        """Dense weights where none had memory: places of this rank's parts, by name."""
        assert self.gate_up is not None
        assert self.down is not None
        self.gate_up, self.down = (
            empty_parameter(*one.shape, device=self.device, dtype=one.dtype)
            for one in (self.gate_up, self.down)
        )
        shards = ((name, place) for name, place, _ in self.named_shards())
        return {name: place for name, place in shards if name.endswith(".weight")}

    def use_packed(self, gate_up: PackedExperts, down: PackedExperts) -> None:
        """Multiply with these from now on, and let go of the plain weights."""
        biases = self.gate_up_bias, self.down_bias
        self.packed = PackedExpertWeights(
            gate_up, down, *biases, self.activation, self.weighs_input
        )
        self.gate_up = self.down = None

    def pack(self, make_kernel: MakeKernel) -> None:
        """Multiply with kernels of the CPU from now on, where it has them, and let go of the plain
        weights."""
        if self.packed is not None:
            return
        weights, found = self.weights, []
        for expert in range(len(weights.gate_up)):
            pair = [
                make_kernel(weight[expert].contiguous(), None if bias is None else bias[expert])
                for weight, bias in (
                    (weights.gate_up, weights.gate_up_bias),
                    (weights.down, weights.down_bias),
                )
            ]
            if pair[0] is None or pair[1] is None:
                return
            found.append((pair[0], pair[1]))
        self.kernels, self.gate_up, self.down = found, None, None
