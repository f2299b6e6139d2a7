"""What the attention backends share."""

from __future__ import annotations

from typing import Any

import torch

from specengine.core.batch import AttentionBackend, AttnPlan, ForwardBatch
from specengine.core.errors import ConfigError
from specengine.kernels.attention.types import Expansion


class RegisteredBackend(AttentionBackend):
    """A backend that --attention-backend names. Its class has `limits`, which are read before one
    is made: importing its file must need no GPU library."""

    @classmethod
    def for_device(cls, device: torch.device) -> AttentionBackend:
        """The backend of the runners of one engine on `device`. Raises ConfigError where it cannot
        run there, or a package is missing."""
        return cls()


def require(is_there: bool, package: str) -> None:
    """Raises ConfigError where a package is missing."""
    if not is_there:
        raise ConfigError(f"{package} is not installed; install specengine[cuda]")


def require_cuda(device: torch.device, name: str) -> None:
    """Raises ConfigError where a backend that only CUDA has is asked for on another device."""
    if device.type != "cuda":
        raise ConfigError(f"{name} needs a CUDA device; use torch on a CPU")


def attach_plan(
    backend: str, batch: ForwardBatch, metadata: Any, expansion: Expansion | None = None
) -> AttnPlan:
    """Puts a plan for this batch on the batch. It is made on the current stream."""
    plan = AttnPlan(
        backend=backend,
        mode=batch.forward_mode,
        batch_size=batch.batch_size,
        num_tokens=batch.num_tokens,
        metadata=metadata,
        expansion=expansion,
    )
    batch.attn_plan = plan
    return plan
