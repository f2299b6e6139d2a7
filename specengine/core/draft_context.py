"""What a drafter may be made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specengine.core.config import SpecConfig
from specengine.core.request import Req


@dataclass(frozen=True)
class DraftContext:
    """runners: runner.ModelRunner, of the draft models that the drafter's `load_draft` loaded."""

    spec: SpecConfig  # resolved
    node_limit: Callable[[Req], int]  # most nodes a request can use now, root included
    runners: Sequence[Any]
    num_rows: int  # rows of the page table, row 0 included
    device: torch.device  # of the target
