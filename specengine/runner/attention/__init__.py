"""Attention backends, one file and one line of core/registry.py's ATTENTION_BACKENDS each, made by
name so that only the one in use is imported.

engine/build.py makes those of an engine: one for all runners, or one for prompts, one for rounds
and one for drafts (make_attention_backends). The interface is core.batch.AttentionBackend. Start
with triton_backend.py, which most engines use, or torch_backend.py, the reference.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specengine.core.errors import ConfigError
from specengine.core.platform import platform_of
from specengine.core.registry import ATTENTION_BACKENDS, load_place
from specengine.kernels.attention import flash_attention
from specengine.kernels.dispatch import has_triton

if TYPE_CHECKING:
    import torch

    from specengine.core.batch import AttentionBackend
    from specengine.core.config import ModelConfig
    from specengine.runner.attention.base import RegisteredBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionBackends:
    """The backends of one engine: the target's, and the draft model's, mostly the same object."""

    target: AttentionBackend
    draft: AttentionBackend

    @property
    def names(self) -> str:
        if self.draft is self.target:
            return self.target.name
        return f"{self.target.name}, {self.draft.name} for drafts"


def make_attention_backends(model: ModelConfig, device: torch.device) -> AttentionBackends:
    """Those that --attention-backend and its forms for prompts, rounds and drafts name. Raises
    ConfigError."""
    target = _by_phase(model, device)
    draft = model.draft_attention_backend and _of_flag(model, "draft_attention_backend", device)
    return AttentionBackends(target, draft or target)


def _by_phase(model: ModelConfig, device: torch.device) -> AttentionBackend:
    fields = [
        field if getattr(model, field) else "attention_backend"
        for field in ("prefill_attention_backend", "decode_attention_backend")
    ]
    prefill, decode = (getattr(model, field) for field in fields)
    if prefill == decode:
        return _of_flag(model, fields[0], device)
    from specengine.runner.attention.by_phase import PhasedAttentionBackend

    return PhasedAttentionBackend(*(_of_flag(model, field, device) for field in fields))


def _of_flag(model: ModelConfig, field: str, device: torch.device) -> AttentionBackend:
    """What a field names. Raises ConfigError, which names its flag."""
    name = getattr(model, field)
    try:
        return make_attention_backend(name, device)
    except ConfigError as error:
        raise ConfigError(f"--{field.replace('_', '-')} {name}: {error}") from error


def make_attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend `name` of core.registry.ATTENTION_BACKENDS for the runners of one engine on
    `device`. "auto" chooses, and logs what and why. Raises ConfigError."""
    if name == "auto":
        return _choose(device)
    if name not in ATTENTION_BACKENDS:
        known = ", ".join(["auto", *ATTENTION_BACKENDS])
        raise ConfigError(f"attention backend {name!r} is unknown; known are {known}")
    return _registered(name).for_device(device)


def runs_in_graphs(name: str) -> bool:
    """Whether forwards of the backend `name` of core.registry.ATTENTION_BACKENDS can be captured in
    graphs. "auto" is what it is on a platform that names no backend of its own: Triton with others
    beside it, or torch where Triton is missing. Known before the backend is made."""
    if name == "auto":
        name = "triton" if has_triton() else "torch"
    return _registered(name).limits.graphs


def _registered(name: str) -> type[RegisteredBackend]:
    found: type[RegisteredBackend] = load_place(ATTENTION_BACKENDS[name])
    return found


def _choose(device: torch.device) -> AttentionBackend:
    """By measurement (benchmarks/results, attention-backends): Triton's kernel decodes and verifies
    fastest at nearly every size, FlashAttention prefills long prompts up to 2.5 times faster."""
    name = platform_of(device).attention_backend
    if name is not None:
        logger.info("attention backend: %s (device %s)", name, device.type)
        return make_attention_backend(name, device)
    if not has_triton():
        logger.warning("attention backend: torch (triton is not installed; expect it to be slow)")
        return make_attention_backend("torch", device)
    if flash_attention.is_installed():
        try:
            flash = flash_attention.load()
        except ImportError as error:
            logger.warning("FlashAttention 3 cannot be loaded (%s): long prompts go slower", error)
        else:
            from specengine.runner.attention.mixed_backend import MixedAttentionBackend

            logger.info("attention backend: triton, and fa for long prompts")
            return MixedAttentionBackend(device, flash)
    logger.info("attention backend: triton (specengine[cuda] brings fa, for long prompts)")
    return make_attention_backend("triton", device)
