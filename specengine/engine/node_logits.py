"""Logits of a verification on the device, as requests want them changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from specengine.core.batch import RowBatch
from specengine.engine.row_choices import Choosing

if TYPE_CHECKING:
    from specengine.engine.graph_round import GraphRound
    from specengine.engine.graph_ruled import Seen


@dataclass(frozen=True)
class NodeLogits:
    """Float32, a row a node."""

    edited_TV: Tensor  # may be written over
    raw_TV: Tensor | None  # where somebody asks for logprobs


def node_logits(flying: GraphRound, seen: Seen, rows: RowBatch, choosing: Choosing) -> NodeLogits:
    """Masked and edited: what is left to a node is what its token, or its weights, come from."""
    logits_TV = flying.runner.model.head.logits(seen.hidden_TH)
    raw_TV = logits_TV.clone() if choosing.logprobs else None
    if choosing.masks:
        logits_TV = flying.masks.apply(logits_TV)
    if choosing.edits:
        flying.choices.edits.apply(logits_TV, rows, seen.batch)
    return NodeLogits(logits_TV, raw_TV)
