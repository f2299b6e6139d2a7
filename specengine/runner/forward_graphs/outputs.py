"""What captured forwards give back, and rows, copies and joins of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch
from specengine.core.interfaces import LogitsOutput


@dataclass(frozen=True)
class FixedForward:
    """The tensors of one graph. `batch` views the inputs that all graphs of the kind share."""

    batch: ForwardBatch
    output: LogitsOutput  # rows of padding included


def first_rows(output: LogitsOutput, num_tokens: int, num_logits: int) -> LogitsOutput:
    """Views of the rows before the padding."""
    argmax, hidden, features = output.argmax, output.hidden, output.features
    return LogitsOutput(
        logits=output.logits[:num_logits],
        argmax=None if argmax is None else argmax[:num_logits],
        hidden=None if hidden is None else hidden[:num_tokens],
        features=None if features is None else features[:num_tokens],
    )


def copy_of(output: LogitsOutput) -> LogitsOutput:
    """A copy that the next replay does not overwrite. argmax is left out."""
    hidden, features = output.hidden, output.features
    return LogitsOutput(
        output.logits.clone(),
        hidden=None if hidden is None else hidden.clone(),
        features=None if features is None else features.clone(),
    )


def joined(outputs: Sequence[LogitsOutput]) -> LogitsOutput:
    """The rows of all parts, in their order. argmax is left out."""
    return LogitsOutput(
        torch.cat([one.logits for one in outputs]),
        hidden=_joined([one.hidden for one in outputs]),
        features=_joined([one.features for one in outputs]),
    )


def _joined(rows: Sequence[Tensor | None]) -> Tensor | None:
    there = [one for one in rows if one is not None]
    return torch.cat(there) if there else None
