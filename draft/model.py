"""What the models of drafters have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specengine.layers.embedding import VocabEmbedding
from specengine.layers.head import Head
from specengine.layers.linear import LMHead
from specengine.layers.module import Module
from specengine.layers.norm import RMSNorm

if TYPE_CHECKING:
    from specengine.core.batch import ForwardBatch


class DraftModel(Module):
    """A core.model.DecoderModel beside a target. `share` must give it the target's embedding and
    head, which its checkpoint may lack, before it runs."""

    embed_tokens: VocabEmbedding | None
    lm_head: LMHead | None
    target_ids: Tensor | None  # int64 [draft_vocab_size] or None, where ids are the target's own

    def share(self, embed: VocabEmbedding, head: Head) -> None:
        """Use the target's, where the checkpoint brought none; of its head the tokens alone that
        the draft can say."""
        norm, ids, own = self._last_norm, self.target_ids, self.lm_head
        self.embed_tokens = self.embed_tokens or embed
        self.head = head.for_draft(norm, ids) if own is None else Head(own, None, norm, ids)
        self.lm_head = self.head.product

    @property
    def embed(self) -> VocabEmbedding:
        assert self.embed_tokens is not None, "share comes first"
        return self.embed_tokens

    @property
    def _last_norm(self) -> RMSNorm | None:
        """Before the head."""
        return None

    def forward_split_prefill(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, end_layer: int
    ) -> Tensor:
        """The first call runs all layers, which are few, and is the last."""
        batch.split_index = end_layer
        hidden: Tensor = self.forward(input_ids, positions, batch)
        return hidden
