"""What a traced model leaves to operations of its own: those that read the batch, at which its
graph may be split, and modules that multiply packed weights.

While torch.compile traces a model there is no batch, only TracedBatch. A layer that would read one
calls its operation here in place of itself. The operation finds layer and batch in the
TracedContext that is entered around each run of what was compiled.

A splitting operation runs outside of CUDA graphs, between two of them, which hold the addresses of
what they read: so it writes into a tensor that the graph ahead has allocated and filled with zeros.
Its inputs have padded rows; it computes those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specengine.core.parallel import Communicator, NoLink
from specengine.kernels.opaque import is_traced, opaque
from specengine.layers.module import Module

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch


class TracedBatch:
    """Takes the place of the ForwardBatch of a forward that is traced: layers take the plain way,
    the one that PLAIN computes, and leave features."""

    compiles = True  # so that no fused path of few rows is taken
    kept_rows = None  # and every row is computed

    def __init__(self, feature_layers: tuple[int, ...]) -> None:
        self.feature_layers = feature_layers
        self.layer_features: list[Tensor] = []


@dataclass
class TracedContext:
    """The one object through which operations of a traced model reach what is no tensor.

    modules: those that are called by number. communicator: of the ranks that share the layers.
    batch: of the forward that runs; None between two, and while graphs are captured.
    """

    modules: Sequence[Numbered]
    communicator: Communicator = field(default_factory=lambda: NoLink.communicator)
    batch: ForwardBatch | None = None

    @classmethod
    def of(cls, model: nn.Module, communicator: Communicator) -> TracedContext:
        """Numbers the model's modules, which a trace then calls by number."""
        modules = [one for one in model.modules() if isinstance(one, Numbered)]
        for number, one in enumerate(modules):
            one._number = number
        return cls(modules, communicator)

    @contextmanager
    def running(self, batch: ForwardBatch | None) -> Iterator[None]:
        """Around a run of what was compiled, for this batch; None for a capture, without one."""
        self.batch = batch
        token = _context.set(self)
        try:
            yield
        finally:
            _context.reset(token)
            self.batch = None


_context: ContextVar[TracedContext] = ContextVar("traced")


class Numbered(Module):
    """A module that a traced model calls through an operation. _number: set before the trace; not
    a property of its weights, hence the underscore (layers/in_place.py)."""

    _number: int | None = None

    @property
    def number(self) -> int:
        assert self._number is not None, "TracedContext.of comes before a trace"
        return self._number

    def run_module(self, x: Tensor) -> Tensor:
        """What the operator `run_module` of a trace runs. A module that calls it amid its own
        `forward` overrides this: what follows there is in the trace already."""
        found: Tensor = self(x)
        return found


@dataclass(frozen=True)
class SplitOp:
    """One kind of operation at which graphs may be split (core/registry.py: SPLITTING_OPS).
    operator: in the traced graph. run: what it does; called in its place where a graph was cut, it
    spares the host PyTorch's dispatcher."""

    name: str
    operator: Any
    run: Callable[..., None]

    def __call__(
        self, layer: Numbered, rows: Sequence[Tensor], out: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Into a trace: `layer.run_split(rows, batch)`, later. rows: [T, ...] each; out: the shape
        of what it gives, behind T."""
        given = list(rows)
        # Zeros for the padding: what follows must not meet what was in this memory before.
        place = given[0].new_zeros((given[0].shape[0], *out), dtype=dtype)
        self.operator(given, place, layer.number)
        return place


def _run_layer(rows: Sequence[Tensor], out: Tensor, number: int) -> None:
    context = _context.get()
    batch = context.batch
    if batch is None:
        return
    run: Callable[..., Tensor] = context.modules[number].run_split  # type: ignore[assignment]
    count = batch.num_tokens
    if count < len(out):
        rows, out = [one[:count] for one in rows], out[:count]
    out.copy_(run(rows, batch))


def _nothing(*_: object) -> None:
    return None


def _of_layers(name: str) -> SplitOp:
    """Two kinds of layers differ in the operator's name alone: so either may be split."""
    schema = f"{name}(Tensor[] rows, Tensor(a!) out, int number) -> ()"
    return SplitOp(name, opaque(schema, _run_layer, _nothing), _run_layer)


ATTENTION = _of_layers("attention")
LATENT_ATTENTION = _of_layers("latent_attention")
GATED_DELTA = _of_layers("gated_delta")
SHARED_EXPERTS = _of_layers("shared_experts")  # of several engines, each with rows of its own


def _run_all_reduce(x: Tensor, out: Tensor) -> None:
    out.copy_(_context.get().communicator.all_reduce(x.clone()))


ALL_REDUCE = SplitOp(
    "all_reduce",
    opaque("all_reduce(Tensor x, Tensor(a!) out) -> ()", _run_all_reduce, _nothing),
    _run_all_reduce,
)


def sum_over(ranks: Communicator, x: Tensor) -> Tensor:
    """``ranks.all_reduce(x)``, also into a trace. ranks: those of the TracedContext."""
    if not is_traced() or ranks.size == 1:
        return ranks.all_reduce(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    ALL_REDUCE.operator(x, out)
    return out


def _run_module(x: Tensor, number: int, width: int) -> Tensor:
    return _context.get().modules[number].run_module(x)


_module = opaque(
    "module(Tensor x, int number, int width) -> Tensor",
    _run_module,
    lambda x, _, width: x.new_empty(x.shape[0], width),
)


def run_module(module: Numbered, x: Tensor, width: int) -> Tensor:
    """Into a trace: `module.run_module(x)`, [T, in] -> [T, width] of x's dtype, row by row. For
    modules that multiply packed or quantised weights, or choose among weights."""
    out: Tensor = _module(x, module.number, width)
    return out
