"""Functions of a researcher that look at what layers give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.errors import ConfigError
from specengine.core.forward_mode import ForwardMode
from specengine.core.model import DecoderModel


@dataclass(frozen=True)
class LayerOutput:
    """What one layer gave in one forward, in copies on the device: whatever a hook does to them
    changes nothing. T tokens of B requests, those of a request side by side."""

    layer: str  # "layers.0" and so on
    hidden_TH: Tensor  # the residual stream behind the layer, in the model's dtype
    tokens_T: Tensor  # int64
    positions_T: Tensor  # int64, of the tokens in their requests; of trees, by depth
    starts: Tensor  # int64 [B + 1]: tokens of request i are starts[i] .. starts[i + 1] - 1
    mode: ForwardMode


LayerHook = Callable[[LayerOutput], object]


@dataclass(frozen=True, eq=False)
class AddedHook:
    """One hook, until it is removed."""

    pattern: str
    layers: tuple[int, ...]  # ascending
    call: LayerHook
    hooks: LayerHooks

    def remove(self) -> None:
        """Graphs serve again after the last. Ignored where it was removed already."""
        if self in self.hooks.added:
            self.hooks.added.remove(self)


@dataclass
class LayerHooks:
    """Of one model. A graph would not call them: while there are any, its forwards run eagerly
    (ModelRunner), and its rounds on the host (Engine)."""

    num_layers: int
    added: list[AddedHook] = field(default_factory=list)

    @property
    def is_used(self) -> bool:
        return bool(self.added)

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(one.pattern for one in self.added)

    def add(self, pattern: str, call: LayerHook) -> AddedHook:
        """pattern: of names from "layers.0" on, with * and ? as in a shell. Raises ConfigError
        where it matches no layer."""
        layers = [n for n in range(self.num_layers) if fnmatchcase(_name(n), pattern)]
        if not layers:
            last = _name(self.num_layers - 1)
            raise ConfigError(f"no layer is called {pattern!r}: there are {_name(0)} to {last}")
        self.added.append(AddedHook(pattern, tuple(layers), call, self))
        return self.added[-1]

    def forward(self, model: DecoderModel, batch: ForwardBatch) -> Tensor:
        """model.forward; then the hooks, layer by layer, those of a layer as they were added. What
        drafters read of layers (batch.feature_layers) is as without."""
        if not self.added:
            return model.forward(batch.input_ids, batch.positions, batch)
        wanted = batch.feature_layers
        watched = {layer for one in self.added for layer in one.layers}
        batch.feature_layers = tuple(sorted(watched.union(wanted)))
        try:
            hidden = model.forward(batch.input_ids, batch.positions, batch)
            found = dict(zip(batch.feature_layers, batch.layer_features, strict=True))
        finally:
            batch.feature_layers = wanted
        batch.layer_features[:] = [found[layer] for layer in wanted]
        for layer in sorted(watched):
            for one in [one for one in self.added if layer in one.layers]:
                one.call(_output(layer, found[layer], batch))
        return hidden


def _name(layer: int) -> str:
    return f"layers.{layer}"


def _output(layer: int, hidden_TH: Tensor, batch: ForwardBatch) -> LayerOutput:
    return LayerOutput(
        layer=_name(layer),
        hidden_TH=hidden_TH.clone(),
        tokens_T=batch.input_ids.clone(),
        positions_T=batch.positions.clone(),
        starts=batch.qo_indptr.clone(),
        mode=batch.forward_mode,
    )
