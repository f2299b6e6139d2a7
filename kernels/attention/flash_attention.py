"""FlashAttention 3 (Shah et al. 2024) over paged KV, from whichever library brings its kernels."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from specengine.kernels.attention.types import FlashAttention


@cache
def vllm_library() -> Path | None:
    """vLLM's build of the kernels, found without importing vLLM."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "vllm_flash_attn"
    return next(iter(sorted(folder.glob("_vllm_fa3_C*.so"))), None)


def is_installed() -> bool:
    return find_spec("sgl_kernel") is not None or vllm_library() is not None


@cache
def load() -> FlashAttention:
    """sglang-kernel's function, or that of vLLM. Raises ImportError where neither can be loaded."""
    problems = []
    if find_spec("sgl_kernel") is not None:
        try:
            from specengine.kernels.attention import flash_attention_sgl

            return flash_attention_sgl.flash_attention
        except ImportError as error:
            problems.append(f"sglang-kernel: {error}")
    if (path := vllm_library()) is not None:
        try:
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
            from specengine.kernels.attention import flash_attention_vllm

            return flash_attention_vllm.flash_attention
        except OSError as error:
            problems.append(f"vllm: {error}")
    raise ImportError("; ".join(problems) or "neither sglang-kernel nor vllm is installed")
