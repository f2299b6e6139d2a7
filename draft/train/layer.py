"""The draft's decoder layer, to train: what layers/decoder.py runs, in differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specengine.layers.compute_paths import TRAINED_LAYER
from specengine.layers.layer_spec import LayerSpec


class DraftNorm(nn.Module):
    """layers.norm.RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


class DraftAttentionProjections(nn.Module):
    """Everything of the attention but the attention itself."""

    def __init__(self, shape: LayerSpec, input_size: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        heads, kv_heads = (
            count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads)
        )
        self.q_proj = nn.Linear(input_size, heads, shape.qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_heads, shape.qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_heads, shape.qkv_bias)
        self.o_proj = nn.Linear(heads, shape.hidden_size, shape.o_bias)
        self.q_norm = DraftNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None
        self.k_norm = DraftNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None

    def forward(self, x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, input_size], cos_sin float32 [R, head_dim] -> q, k (rotated) and v, each
        [R, heads, head_dim]."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos_sin), rotate(k, cos_sin), v


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [R, heads, D]; cos_sin float32 [R, D], cosines then sines of the pairs (i, i + D / 2)."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class DraftMLP(nn.Module):
    """layers.mlp.GatedMLP."""

    def __init__(self, size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias)
        self.up_proj = nn.Linear(size, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, size, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """Parameters are called as in checkpoints. input_size: of what attention reads. Raises
    ModelLoadError for a layer that is described with what training does not compute."""

    def __init__(self, shape: LayerSpec, input_size: int, has_hidden_norm: bool) -> None:
        super().__init__()
        TRAINED_LAYER.require(shape)
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = DraftNorm(size, eps)
        self.hidden_norm = DraftNorm(size, eps) if has_hidden_norm else None
        self.self_attn = DraftAttentionProjections(shape, input_size)
        self.post_attention_layernorm = DraftNorm(size, eps)
        self.mlp = DraftMLP(size, shape.intermediate_size, shape.mlp_bias)

    @torch.no_grad()
    def begin(self) -> None:
        """Random values that add little to the stream."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for last in (self.self_attn.o_proj, self.mlp.down_proj):
            last.weight.mul_(0.3)

    def finish(self, heads: Tensor, residual: Tensor) -> Tensor:
        """Outputs of the heads [R, num_heads, head_dim] and the residual stream [R, H] -> the
        stream behind the layer."""
        stream = residual + self.self_attn.o_proj(heads.flatten(1))
        out: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out
