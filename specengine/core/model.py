"""A decoder, as the runner and drafters see it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch
    from specengine.kernels.head.types import BlockPartials


class Embedding(Protocol):
    """layers.embedding.VocabEmbedding: the token embedding, which drafters may borrow."""

    def __call__(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H], rows as the checkpoint has them, no multiplier applied."""
        ...


class Head(Protocol):
    """layers.head.Head: what reads tokens from hidden states, which drafters may borrow."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V]."""
        ...

    def best(self, hidden: Tensor) -> Tensor:
        """[R, H] -> int64 [R], where `logits` has its largest value, the first among equals, as the
        target numbers tokens."""
        ...

    def top(self, hidden: Tensor, topk: int) -> BlockPartials | None:
        """[R, H] -> the topk best of each row of `logits` and its log-sum-exp, by block of columns;
        None where `logits` is as fast."""
        ...


class DecoderModel(Protocol):
    """A decoder that ModelRunner can run (an nn.Module in target/models)."""

    config: Any
    num_layers: int
    vocab_size: int

    @property
    def embed(self) -> Embedding: ...

    @property
    def head(self) -> Head: ...

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """int64 [T], int64 [T] -> hidden states after the final norm, [T, H], or those of
        batch.kept_rows alone. Outputs of batch.feature_layers, residual included, are left on
        batch.layer_features in order of depth."""
        ...

    def forward_split_prefill(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, end_layer: int
    ) -> Tensor | None:
        """Run layers batch.split_index .. end_layer - 1, carrying state on the batch. Returns the
        final hidden states once the last layer is done, None before."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Consume (checkpoint name, tensor) pairs. Raises ModelLoadError naming any tensor that is
        missing, unexpected or of the wrong shape."""
        ...
