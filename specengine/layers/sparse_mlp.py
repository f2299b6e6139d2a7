"""A mixture of experts in place of a feed-forward layer: a router, the experts that it chooses, and
what every row runs beside them.

Parameters have one name each, whatever checkpoints call them: `gate` is the router, the experts are
`experts.<number>.{gate,up,down}_proj`, and what every row runs is `shared_expert`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.core.parallel import communicator, split_over
from specengine.core.sharing import ExpertSharers, expert_sharers
from specengine.kernels.experts.types import Chosen
from specengine.kernels.experts.weigh_shared import weigh_shared
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.opaque import is_traced
from specengine.layers.experts import Experts, Router
from specengine.layers.layer_spec import ExpertsSpec, LayerSpec
from specengine.layers.linear import Linear
from specengine.layers.mlp import FeedForward, GatedMLP, make_mlp
from specengine.layers.norm import RMSNorm
from specengine.layers.side_stream import both
from specengine.layers.split_ops import SHARED_EXPERTS, Numbered, run_module


class SharedGate(Linear):
    """The logit of what is shared: one output, which few bits would not make faster."""

    keeps_precision = True

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)


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
        if self.shared_expert is None:
            return self._chosen(x)
        room = self.experts.room(x)
        place = None if room is None else room[-1]
        out, share = self._beside_chosen(x, lambda x: self._share(x, place), room)
        if room is None:
            return out + share
        assert len(out) + 1 == len(room), "all parts that the norm adds up are filled"
        return room

    def run_split(self, rows: Sequence[Tensor], batch: object) -> Tensor:
        """What the operator SHARED_EXPERTS runs: no graph holds how many rows the other engines
        have."""
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
        out, shared = self._beside_chosen(x, part) if part else (self._chosen(x), None)
        out = out.sum(0) if out.dim() == 3 else out
        if shared is not None:
            out = out + self._gated(x, shared)
        return self.ranks.all_reduce(out.to(x.dtype))

    def _beside_chosen(
        self, x: Tensor, shared: Callable[[Tensor], Tensor], into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `_chosen` gives, and shared(x)."""
        chosen = None if self._shared_starts_first() else self.gate.choose(x)
        return both(x, lambda x: self._chosen(x, chosen, into), shared)

    def _shared_starts_first(self) -> bool:
        """Whether the shared expert starts before rows are routed: where it rounds rows to FP8.

        On an H200 a step of 1 row then takes 3 to 18% less of Qwen3-Next, and within 1.5% the same
        of GLM-4.5-Air and DeepSeek-V3. In bfloat16 and 4 bits a small one wins nothing, and a large
        one makes routing slower, which the chosen experts wait for: a step takes 1 to 9% more
        (`shared-experts` of benchmarks/results)."""
        return self.shared_expert is not None and self.shared_expert.takes is not None

    def _chosen(
        self, x: Tensor, chosen: Chosen | None = None, into: Tensor | None = None
    ) -> Tensor:
        """What the experts of each row give: [T, hidden_size], or parts [P, T, hidden_size]."""
        chosen = self.gate.choose(x) if chosen is None else chosen
        return self.experts.forward(x, chosen, into)

    def _share(self, x: Tensor, into: Tensor | None) -> Tensor:
        """What the shared expert gives, behind its gate: [T, hidden_size], or `into`, float32."""
        assert self.shared_expert is not None
        shared, gate = self.shared_expert(x), self.shared_expert_gate
        if into is None:
            return self._gated(x, shared)
        if gate is not None and gate.is_plain:
            weigh_shared(shared, x, gate.plain, into)
        else:
            weigh_shared(self._gated(x, shared), None, None, into)
        return into

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
