"""Plain PyTorch in place of the layers that SGLang's and vLLM's EAGLE-3 models are built of: the
same names, arguments and weight loaders, one process, one request, float32."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """With a residual it adds first, and gives both: what is normed, and the sum."""

    def __init__(self, size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + self.eps)
        return normed * self.weight if residual is None else (normed * self.weight, total)


class JoinedLinear(nn.Module):
    """Several maps of one input, one below the other; a checkpoint brings them one by one."""

    def __init__(self, input_size: int, sizes: dict[Any, int], bias: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.full((sum(sizes.values()), input_size), math.nan))
        assert not bias, "drafts with biases are not compared"
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: Tensor, loaded: Tensor, shard: Any = None) -> None:
        """vLLM writes on the tensor which shard it is; SGLang says it beside."""
        shard = getattr(loaded, "shard_id", shard)
        names = list(self.sizes)
        first = sum(self.sizes[name] for name in names[: names.index(shard)])
        assert loaded.shape == (self.sizes[shard], parameter.shape[1]), (shard, loaded.shape)
        parameter.data[first : first + self.sizes[shard]] = loaded

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(torch.split(F.linear(x, self.weight), list(self.sizes.values()), dim=-1))


class QKVParallelLinear(JoinedLinear):
    def __init__(
        self, size: int, head_dim: int, heads: int, kv_heads: int, bias: bool, **unused: Any
    ) -> None:
        sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        super().__init__(size, sizes, bias)


class ReplicatedLinear(nn.Linear):
    def __init__(self, input_size: int, output_size: int, bias: bool, **unused: Any) -> None:
        super().__init__(input_size, output_size, bias)


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, *unused: Any, **too: Any) -> None:
        super().__init__()
        sizes = {0: intermediate_size, 1: intermediate_size}
        self.gate_up_proj = JoinedLinear(hidden_size, sizes, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class LlamaAttention(nn.Module):
    """Causal, over the rows kept in `keys` and `values`, which new rows join."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.total_num_heads = int(config.num_attention_heads)
        self.total_num_kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(config.head_dim)
        self.theta = float(config.rope_parameters["rope_theta"])
        assert config.rope_parameters.get("rope_type", "default") == "default"
        size = self.total_num_heads * self.head_dim
        self.qkv_proj: nn.Module = nn.Identity()  # the EAGLE-3 layer brings its own
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.keys = self.values = torch.empty(0, self.total_num_kv_heads, self.head_dim)

    def keep(self, rows: int) -> None:
        self.keys, self.values = self.keys[:rows], self.values[:rows]

    def forward(self, positions: Tensor, hidden_states: Tensor, **unused: Any) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv_proj(hidden_states))
        self.keys = torch.cat([self.keys, self._rotate(k, positions)])
        self.values = torch.cat([self.values, v])
        group = self.total_num_heads // self.total_num_kv_heads
        keys, values = (x.repeat_interleave(group, dim=1) for x in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", self._rotate(q, positions), keys)
        first = len(keys) - len(q)
        later = torch.arange(len(keys)) > torch.arange(first, len(keys))[:, None]
        weights = (scores * self.head_dim**-0.5).masked_fill(later, -math.inf).softmax(-1)
        out: Tensor = self.o_proj(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
        return out

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Neox style: the first half of a head's dimensions turns with the second."""
        half = self.head_dim // 2
        angles = positions[:, None, None] * self.theta ** -(torch.arange(half) / half)
        left, right = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class LlamaDecoderLayer(nn.Module):
    """SGLang hands over the configuration first; vLLM its own, and the draft's by name."""

    def __init__(self, first: Any, *unused: Any, config: Any = None, **too: Any) -> None:
        super().__init__()
        config = first if config is None else config
        self.hidden_size = int(config.hidden_size)
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class VocabParallelEmbedding(nn.Module):
    """Stays empty until the target's weights are lent, as both engines do."""

    def __init__(self, vocab_size: int, size: int, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((vocab_size, size), math.nan))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class ParallelLMHead(VocabParallelEmbedding):
    pass


class LogitsProcessor:
    def __init__(self, *unused: Any, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, head: ParallelLMHead, hidden: Tensor) -> Tensor:
        return F.linear(hidden, head.weight) * self.scale


def default_weight_loader(parameter: Tensor, loaded: Tensor) -> None:
    assert parameter.shape == loaded.shape, (parameter.shape, loaded.shape)
    parameter.data.copy_(loaded)


def decorator_with_options(*args: Any, **options: Any) -> Any:
    return args[0] if args else lambda decorated: decorated


LAYERS: dict[str, Any] = {
    one.__name__: one
    for one in (
        RMSNorm,
        QKVParallelLinear,
        ReplicatedLinear,
        LlamaMLP,
        LlamaDecoderLayer,
        VocabParallelEmbedding,
        ParallelLMHead,
        LogitsProcessor,
        default_weight_loader,
    )
}
LAYERS |= {
    "LlamaForCausalLM": nn.Module,
    "LlamaAttention": LlamaAttention,
    "support_torch_compile": decorator_with_options,
    "support_quantized_model_reload_from_hp_weights": decorator_with_options,
    "layer_stack": nullcontext,
    "init_logger": logging.getLogger,
    "add_prefix": lambda name, prefix: f"{prefix}.{name}",
    "get_spec": lambda: SimpleNamespace(speculative_draft_window_size=None),
    "supports_any_eagle": lambda model: True,
}
