"""MiMo (Xiaomi 2025, arXiv:2505.07608)."""

from __future__ import annotations

from specengine.target.models.qwen import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with layers beside it that predict further tokens: `model.mtp_layers.*`, which
    --speculative-algorithm MTP drafts with."""

    extends_config = "qwen2"
    mtp_form = "MiMo"
