"""A mixture of experts in place of a feed-forward layer (Shazeer et al. 2017, arXiv:1701.06538).

Parameters have one name each, whatever checkpoints call them: `gate` is the router, the experts are
`experts.<number>.{gate,up,down}_proj`, and what every row runs is `shared_expert`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from specengine.core.errors import ModelLoadError
from specengine.core.parallel import Cut, communicator, even_cut, split_over
from specengine.core.sharing import ExpertSharers, expert_sharers
from specengine.kernels.experts import experts as op
from specengine.kernels.experts import experts_ref, route_ref
from specengine.kernels.experts.add_shared import add_shared
from specengine.kernels.experts.packed import OneExpert, PackedExperts, PackedExpertWeights
from specengine.kernels.experts.route import route
from specengine.kernels.experts.types import Activation, Chosen, ExpertWeights, Routing
from specengine.kernels.experts.types import Router as RouterWeights
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.opaque import is_traced
from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.layers.linear import IncomingWeight, Linear, LinearKernel, weight_device
from specengine.layers.mlp import FeedForward, GatedMLP, make_mlp
from specengine.layers.module import Module
from specengine.layers.norm import RMSNorm
from specengine.layers.side_stream import both
from specengine.layers.split_ops import SHARED_EXPERTS, Numbered, run_module

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


class SharedGate(Linear):
    """The logit of what is shared: one output, which few bits would not make faster."""

    keeps_precision = True

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)


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
        self.gate_up = _parameter(count, 2 * inner, hidden_size, device=place)
        self.down = _parameter(count, hidden_size, inner, device=place)
        self.gate_up_bias = _parameter(count, 2 * inner) if bias else None
        self.down_bias = _parameter(count, hidden_size) if bias else None
        self.kernels: list[tuple[LinearKernel, LinearKernel]] | None = None
        self.packed: PackedExpertWeights | None = None
        self.incoming: dict[str, IncomingExpert] | None = None  # while a checkpoint is read
        self.weighs_input = spec.weighs_input
        self.activation = Activation(spec.activation, spec.activation_alpha, spec.activation_limit)

    def forward(self, x: Tensor, chosen: Chosen) -> Tensor:
        """[T, H] -> [T, H], or float32 [K, T, H], the parts of the sum, for RMSNorm.add."""
        kernels = self.kernels
        if kernels is None:
            return op.experts(x, chosen, self.packed or self.weights)
        return experts_ref.by_expert(
            x,
            chosen,
            lambda expert, rows: kernels[expert][0](rows),
            lambda expert, rows: kernels[expert][1](rows),
            self.activation,
            self.weighs_input,
        )

    @property
    def weights(self) -> ExpertWeights:
        """The weights of experts that have not been packed."""
        assert self.gate_up is not None, "the weights were packed"
        assert self.down is not None
        biases = self.gate_up_bias, self.down_bias
        return ExpertWeights(self.gate_up, self.down, *biases, self.activation, self.weighs_input)

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
            _parameter(*one.shape, device=self.device, dtype=one.dtype)
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


class SparseMLP(Numbered):
    """``sum of w * expert(x) over the chosen + shared(x)``; with a gate on what is shared,
    ``sigmoid(gate(x)) * shared(x)``."""

    def __init__(self, hidden_size: int, spec: ExpertsSpec) -> None:
        super().__init__()
        self.waits = False  # as layers.linear.Linear has it: routers and experts read the input
        self.spec = spec
        self.sharers = expert_sharers()
        self.ranks = communicator() if self.sharers is None else self.sharers.experts
        self.gate = Router(hidden_size, spec)
        with split_over(self.ranks):
            self.experts = Experts(hidden_size, spec)
            size = spec.shared_size
            self.shared_expert = GatedMLP(hidden_size, size) if size else None
        self.shared_expert_gate = SharedGate(hidden_size) if spec.shared_gate else None

    @property
    def takes(self) -> Fp8Input | None:
        """As layers.linear.Linear has it: of experts, or else the shared one; gates round none."""
        if is_traced() or self.sharers is not None:
            return None
        packed, shared = self.experts.packed, self.shared_expert
        if packed is not None and packed.gate_up.input is not None:
            return packed.gate_up.input
        return None if shared is None else shared.takes

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> the same shape."""
        parts = self.parts(x)
        return parts.sum(0).to(x.dtype) if parts.dim() == 3 else parts

    def parts(self, x: Tensor) -> Tensor:
        """The same, perhaps in float32 parts [P, T, hidden_size], for RMSNorm.add."""
        if is_traced():
            if self.sharers is not None:
                return SHARED_EXPERTS(self, [x], (x.shape[-1],), x.dtype)
            return run_module(self, x, x.shape[-1])
        if self.sharers is not None:
            return self._over_engines(x, self.sharers)
        if self.ranks.size > 1:
            return self._over_ranks(x)
        shared_expert, gate = self.shared_expert, self.shared_expert_gate
        if shared_expert is None:
            return self._chosen(x)
        out, shared = both(x, self._chosen, shared_expert)
        if out.dim() == 2:
            return out + self._gated(x, shared)
        if gate is not None and gate.is_plain:
            return add_shared(out, shared, x, gate.plain)
        return add_shared(out, self._gated(x, shared))

    def run_split(self, rows: Sequence[Tensor], batch: object) -> Tensor:
        """What SHARED_EXPERTS stands for: no graph holds how many rows the other engines have."""
        assert self.sharers is not None
        return self._over_engines(rows[0], self.sharers)

    def _over_engines(self, x: Tensor, sharers: ExpertSharers) -> Tensor:
        if not sharers.runs:
            assert not len(x), "a forward of one rank alone has no tokens"
            return x
        return sharers.own_rows(self._over_ranks(sharers.rows_of_all(x)))

    def _over_ranks(self, x: Tensor) -> Tensor:
        """One sum over ranks, of what the experts and the shared one give on each."""
        part = self.shared_expert and self.shared_expert.own_part
        out, shared = both(x, self._chosen, part) if part else (self._chosen(x), None)
        out = out.sum(0) if out.dim() == 3 else out
        if shared is not None:
            out = out + self._gated(x, shared)
        return self.ranks.all_reduce(out.to(x.dtype))

    def _chosen(self, x: Tensor) -> Tensor:
        """What the experts of each row give: [T, hidden_size], or parts [K, T, hidden_size]."""
        return self.experts.forward(x, self.gate.choose(x))

    def _gated(self, x: Tensor, shared: Tensor) -> Tensor:
        if self.shared_expert_gate is None:
            return shared
        return shared * torch.sigmoid(self.shared_expert_gate(x))

    def few_rows(self, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor | None]:
        """What this adds to the stream [T, hidden_size], behind its norm, and the stream."""
        return self.parts(norm(stream)), stream


def feed_forward(spec: LayerSpec) -> FeedForward | SparseMLP:
    """What a layer's description asks for behind attention. Raises ModelLoadError where nothing
    computes it."""
    if spec.experts is not None:
        if spec.activation not in ("silu", spec.experts.activation):
            raise ModelLoadError(f"activation {spec.activation!r} is not supported of experts")
        return SparseMLP(spec.hidden_size, spec.experts)
    return make_mlp(spec)


def _parameter(
    *shape: int, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype), requires_grad=False)
