"""Attention backends, one file each; made by name, so that only the one in use is imported."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from specengine.core.errors import ConfigError
from specengine.kernels.dispatch import has_triton

if TYPE_CHECKING:
    import torch

    from specengine.core.interfaces import AttentionBackend

logger = logging.getLogger(__name__)


def make_attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend `name` ("auto", "torch" or "triton") for one runner on `device`. "auto" takes
    Triton on a CUDA device where it is installed, else torch, and logs why. Raises ConfigError."""
    if name == "auto":
        name = _choose(device)
    if name == "torch":
        from specengine.runner.attention.torch_backend import TorchAttentionBackend

        return TorchAttentionBackend()
    if name == "triton":
        if not has_triton():
            raise ConfigError(
                "--attention-backend triton: triton is not installed; install specengine[cuda]"
            )
        from specengine.runner.attention.triton_backend import TritonAttentionBackend

        return TritonAttentionBackend(device)
    raise ConfigError(f"attention backend {name!r} is unknown; use auto, torch or triton")


def _choose(device: torch.device) -> str:
    if device.type != "cuda":
        logger.info("attention backend: torch (no CUDA device)")
        return "torch"
    if not has_triton():
        logger.warning("attention backend: torch (triton is not installed; expect it to be slow)")
        return "torch"
    logger.info("attention backend: triton")
    return "triton"
