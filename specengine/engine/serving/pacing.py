"""Forwards of prompts that end soon, so that no other request waits long."""

from __future__ import annotations

import torch

from specengine.core.platform import platform_of
from specengine.engine.parts import EngineParts
from specengine.scheduler.pace import PromptPace

LONGEST = 0.1  # seconds of a forward of prompts


def pace_prompts(parts: EngineParts) -> None:
    """While others may come: split prompts by the time that forwards take, where a whole chunk
    takes long and the host sees how long, which is on CPUs. Not with several ranks: each has a
    clock of its own, and all must split prompts alike."""
    device = torch.device(parts.config.model.device)
    if parts.link.communicator.size == 1 and not platform_of(device).is_accelerator:
        parts.scheduler.admission.pace = PromptPace(LONGEST)
