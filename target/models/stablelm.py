"""StableLM 3B, Zephyr 3B and StableLM 2 (arXiv:2402.17834)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from specengine.core.errors import ModelLoadError
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.rotary import rotary_fraction
from specengine.runner.loader.family import GgufFormat
from specengine.runner.loader.gguf_fields import biases, rope_of_part
from specengine.target.models.llama import LlamaForCausalLM


class StableLmForCausalLM(LlamaForCausalLM):
    """LayerNorm with bias, part of a head rotated. The larger StableLM 2 computes attention and
    feed-forward side by side, behind one norm, and normalises each head of q and k."""

    gguf: ClassVar[GgufFormat | None] = GgufFormat(
        ("stablelm",),
        "stablelm",
        epsilon="layer_norm_eps",
        # Files say use_parallel_residual of models that have a norm before feed-forward, too.
        fields=lambda file: {
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensor_names,
            "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensor_names,
            "rope_parameters": rope_of_part(file),
            **biases(file, use_qkv_bias="attn_q"),
        },
    )
    small_config: ClassVar[dict[str, Any]] = {
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "use_qkv_bias": True,
    }

    @classmethod
    def layer_spec(cls, config: Any) -> LayerSpec:
        return LayerSpec.from_config(
            config,
            norm="layer_bias",
            rms_norm_eps=config.layer_norm_eps,
            norm_places="shared" if config.use_parallel_residual else "before",
            qk_norm_by_head=bool(config.qk_layernorm),
            rotary_fraction=rotary_fraction(config),
            qkv_bias=bool(config.use_qkv_bias),
        )

    def own_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return with_joined_gains(super().own_tensors(weights), self.model.spec)


def with_joined_gains(
    weights: Iterable[tuple[str, Tensor]], spec: LayerSpec
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor), the gains of q's and k's heads, each a tensor in checkpoints
    (`q_layernorm.norms.<head>.weight`), as one a layer: `q_norm.weight` [heads, head_dim]. Raises
    ModelLoadError where a layer has those of other heads."""
    found: dict[str, dict[int, Tensor]] = {}
    counts = {"q": spec.num_heads, "k": spec.num_kv_heads}
    for name, tensor in weights:
        start, marker, rest = name.partition("_layernorm.norms.")
        if not marker:
            yield name, tensor
            continue
        gains = found.setdefault(start, {})
        gains[int(rest.removesuffix(".weight"))] = tensor
        if len(gains) == counts[start[-1]]:
            del found[start]
            yield f"{start}_norm.weight", torch.stack([gains[head] for head in sorted(gains)])
    for start, gains in found.items():
        raise ModelLoadError(
            f"{start}_layernorm.norms of heads {sorted(gains)}; config.json states other heads"
        )
