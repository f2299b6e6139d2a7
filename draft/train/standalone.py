"""A standalone drafter: a small model of the target's vocabulary that says what the target says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from specengine.core.options import option
from specengine.draft.train.causal_lm import CausalLmTask, ModelShape, learns_answers
from specengine.draft.train.model_directory import make_llama
from specengine.draft.train.teacher import Teacher


@dataclass(frozen=True, kw_only=True)
class StandaloneConfig(ModelShape):
    section: ClassVar[str] = "task"

    teacher_weight: float = option(
        1.0, "of the target's whole distribution in the loss; the rest is of the next token alone"
    )
    feature_cache_mb: int = option(
        0, "MiB, where the target is, for its outputs on documents that come again; 0: run it anew"
    )

    def _check_ranges(self) -> None:
        super()._check_ranges()
        self._at_least(0, "feature_cache_mb")
        self._require(0.0 <= self.teacher_weight <= 1.0, "teacher_weight", "is a share, 0 to 1")


def make_standalone_task(config: StandaloneConfig, teacher: Teacher) -> CausalLmTask:
    """Raises ConfigError or ModelLoadError."""
    tokenizer = teacher.loaded.tokenizer
    module = make_llama(config, tokenizer, teacher.vocab_size)
    dtype: torch.dtype = getattr(torch, config.dtype)
    weight = config.teacher_weight
    return CausalLmTask("standalone", module, tokenizer, dtype, learns_answers, teacher, weight)
