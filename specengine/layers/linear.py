"""Linear layers whose weights are plain tensors until `pack_linears` puts them into the form that
the machine multiplies fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specengine.core.parallel import AnyCut, Cut, VocabularyCut, communicator
from specengine.kernels.linear import few_row, split_linear
from specengine.kernels.linear.quantised import Fp8Input
from specengine.kernels.opaque import is_traced
from specengine.layers.module import empty_parameter
from specengine.layers.split_ops import Numbered, run_module, sum_over

# Of weights that are not quantised.
PLAIN_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LinearKernel(Protocol):
    """A packed weight: maps [T, in] to [T, out], bias included."""

    def __call__(self, x: Tensor) -> Tensor: ...


class GatedKernel(Protocol):
    """Of a packed weight whose rows of gate come before those of up: maps [T, in] to
    act(gate) * up, [T, out / 2], with the bits of `act_and_mul` behind the product."""

    def __call__(self, x: Tensor, activation: str) -> Tensor: ...


_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@contextmanager
def deferred_weights() -> Iterator[None]:
    """Linear layers that are made inside have weights without memory, on the device "meta": what a
    checkpoint holds in their place is known only when it is read (layers/quantization)."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def weight_device() -> torch.device:
    """Where a weight that is made now lies: "meta" while weights are deferred."""
    return torch.device("meta") if _deferred.get() else torch.empty(0).device


class IncomingWeight:
    """Tensors of one linear layer as a checkpoint names them, collected on the device while it is
    read: leaf of the name ("weight", "weight_scale", …) -> tensor. `name`: of the layer there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = ""
        self.tensors: dict[str, Tensor] = {}
        self.came_merged = False  # the checkpoint has the tensors of all parts as one

    def take(self, name: str, tensor: Tensor) -> None:
        """name: the tensor's whole name."""
        self.name, _, leaf = name.rpartition(".")
        self.tensors[leaf] = tensor.to(self.device)


class Linear(Numbered):
    """y = x W^T + b, with W [out_features, in_features] stored as in checkpoints."""

    keeps_precision = False  # weight-only quantization leaves it as it is
    gives_parts = True  # of several ranks, the sum is fewer bytes to reduce
    keeps_plain = False  # `plain` is read by others: it is neither packed nor kept quantised
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.device = torch.empty(0).device  # where it runs, also while its weight is deferred
        self.weight = empty_parameter(out_features, in_features, device=weight_device())
        self.bias = empty_parameter(out_features, device=self.device) if bias else None
        self.kernel: LinearKernel | None = None
        self._takes: Fp8Input | None = None
        self.incoming: list[IncomingWeight] | None = None  # while a checkpoint is read
        self.merged: IncomingWeight | None = None  # of all parts, in place of these

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features]."""
        if self.kernel is not None:
            return run_module(self, x, self.out_features) if is_traced() else self.kernel(x)
        return F.linear(x, self.plain, self.bias)

    def parts(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features] or, where that is faster, float32
        [P, T, out_features], whose sum that is; for RMSNorm.add."""
        if self.bias is not None or not self.gives_parts or is_traced():
            return self.forward(x)
        if self.kernel is None:
            fits = split_linear.fits(x, self.plain)
            return split_linear.split_linear(x, self.plain) if fits else self.forward(x)
        parts_of = getattr(self.kernel, "parts_of", None)
        parts: Tensor | None = None if parts_of is None else parts_of(x)
        return self.forward(x) if parts is None else parts

    @property
    def plain(self) -> Tensor:
        """The weight of a layer that has not been packed."""
        assert self.weight is not None, "the weight was packed or is quantised"
        return self.weight

    @property
    def is_plain(self) -> bool:
        """Whether `plain` is what is multiplied. Fused paths read it, and refuse other layers."""
        return self.kernel is None

    @property
    def own_weights(self) -> int:
        """As Module has it. What kernels keep is no parameter."""
        return super().own_weights if self.is_plain else self.in_features * self.out_features

    @property
    def part_sizes(self) -> list[int]:
        """Outputs of each layer that a checkpoint keeps apart."""
        return [self.out_features]

    @property
    def whole_sizes(self) -> list[int]:
        """As `part_sizes`, of all ranks together."""
        pairs = zip(self.part_sizes, self.cuts("weight"), strict=True)
        return [size if cut is None or cut.dim else cut.whole for size, cut in pairs]

    @property
    def whole_inputs(self) -> int:
        """in_features of all ranks together."""
        (cut, *_) = self.cuts("weight")
        return cut.whole if cut is not None and cut.dim else self.in_features

    def cuts(self, kind: str) -> Sequence[AnyCut | None]:
        """This rank's part of each of the checkpoint's tensors that fill a parameter (weight or
        bias), in the order of `MergedLinear.shards`; None is all of it."""
        return [None]

    @property
    def gated_kernel(self) -> GatedKernel | None:
        """The product and the gated activation behind it as one, where the weight has that."""
        found: GatedKernel | None = getattr(self.kernel, "gated", None)
        return found

    @property
    def takes(self) -> Fp8Input | None:
        """The form that rows are rounded to before they are multiplied; None: they are not, or
        the layer is traced. The maker of the rows may round them, too
        (kernels/linear/rounded.py)."""
        return None if is_traced() else self._takes

    @property
    def waits(self) -> bool:
        """Whether the norm right ahead may let this product start at once: a packed weight's kernel
        says that it waits by itself (awaited, of kernels.linear.norm). In a trace none does."""
        return not is_traced() and bool(getattr(self.kernel, "waits", False))

    @property
    def completes_input(self) -> bool:
        """Whether the kernel that is launched behind this product may read the product's input
        before it waits (kernels.linear.few_row, into): the product signals behind its own wait."""
        return not is_traced() and bool(getattr(self.kernel, "completes_input", False))

    def use_kernel(self, kernel: LinearKernel, takes: Fp8Input | None = None) -> None:
        """Multiply with `kernel` from now on, and let go of the plain weight. takes: the form that
        it rounds rows to."""
        self.kernel, self._takes = kernel, takes
        self.weight = None


class MergedLinear(Linear):
    """Several linear layers of one input as one product; their outputs lie side by side.

    Checkpoints keep them apart: `shards` cuts a parameter into the parts they fill.
    """

    def __init__(
        self,
        in_features: int,
        shard_sizes: Sequence[int],
        bias: bool = False,
        parts: Sequence[AnyCut] | None = None,
    ) -> None:
        """parts: of a column-parallel layer, this rank's outputs of each, whose sizes are the
        shard_sizes."""
        super().__init__(in_features, sum(shard_sizes), bias)
        self.shard_sizes = list(shard_sizes)
        self.parts_of_ranks = parts

    def cuts(self, kind: str) -> Sequence[AnyCut | None]:
        return self.parts_of_ranks or [None] * len(self.shard_sizes)

    @property
    def part_sizes(self) -> list[int]:
        return self.shard_sizes

    def take_merged(self, name: str, tensor: Tensor) -> None:
        """A tensor of a quantised checkpoint that stands for all parts together."""
        assert self.incoming is not None
        if self.merged is None:
            self.merged = IncomingWeight(self.incoming[0].device)
            for part in self.incoming:
                part.came_merged = True
        self.merged.take(name, tensor)

    def shards(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Views of `parameter` (weight or bias), one a merged layer."""
        return torch.split(parameter, self.shard_sizes)


class ColumnParallelLinear(Linear):
    """A layer of which each rank has some outputs, and the weights of these. part: this rank's."""

    def __init__(self, in_features: int, part: Cut, bias: bool = False) -> None:
        super().__init__(in_features, part.size, bias)
        self.part = part

    def cuts(self, kind: str) -> Sequence[AnyCut | None]:
        return [self.part]


class RowParallelLinear(Linear):
    """A layer of which each rank has the weights of some inputs: the outputs are summed over ranks.
    Rank 0 adds the bias; that of the others is zero."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, part: Cut | None = None
    ) -> None:
        """in_features: of all ranks. part: this rank's, None is all."""
        super().__init__(in_features if part is None else part.size, out_features, bias)
        self.ranks = communicator()
        self.gives_parts = self.ranks.size == 1
        self.part = part
        self._zeros: Tensor | None = None  # [few_row.MAX_ROWS, out_features]

    # What this rank adds to the sum, for callers that make one sum of several.
    own_part = Linear.forward

    def forward(self, x: Tensor) -> Tensor:
        part = self.own_part(x)
        return part if self.ranks.size == 1 else sum_over(self.ranks, part)

    def run_module(self, x: Tensor) -> Tensor:
        """The sum over ranks is in the trace."""
        return self.own_part(x)

    def add_few_rows(self, x: Tensor, stream: Tensor) -> Tensor:
        """``stream + self(x)`` by few_row's kernels: [T, in], [T, out] -> [T, out]."""
        if self.ranks.size == 1:
            return few_row.linear_add(x, self.plain, stream, self.bias)
        if self._zeros is None:
            self._zeros = stream.new_zeros(few_row.MAX_ROWS, self.out_features)
        # Each rank's product alone is rounded, as that of `forward` is, and not with the stream.
        product = few_row.linear_add(x, self.plain, self._zeros[: len(x)], self.bias)
        return self.ranks.all_reduce_add(product, stream)

    def cuts(self, kind: str) -> Sequence[AnyCut | None]:
        if kind == "bias":
            count = self.out_features
            return [Cut(0, 0, 0 if self.ranks.rank else count, count)]
        return [None if self.part is None else self.part.along(1)]


class LMHead(Linear):
    """The output projection. Weight-only quantization keeps more bits here than elsewhere. Ranks
    have the rows of some tokens each: `tokens`."""

    def __init__(self, in_features: int, vocab_size: int, bias: bool = False) -> None:
        self.tokens = VocabularyCut.of(vocab_size)
        super().__init__(in_features, self.tokens.cut.size, bias)

    def cuts(self, kind: str) -> Sequence[AnyCut | None]:
        return [self.tokens.cut]

    def tie(self, embedding: Tensor) -> None:
        """Use the embedding's own rows."""
        assert isinstance(embedding, nn.Parameter)
        self.weight = embedding
