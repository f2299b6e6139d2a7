"""DFlash's equations, read plainly from a checkpoint's own tensors and the hidden states of
transformers' target. Shares no code with the model under test."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F


class DFlashReading:
    """Drafts for one request at a time, always from the start of its text."""

    def __init__(self, draft: Path, target: Path) -> None:
        import transformers

        self.raw = json.loads((draft / "config.json").read_text())
        self.config = self.raw.get("transformer_layer_config", self.raw)
        self.tensors = load_file(draft / "model.safetensors")
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(target)
        self.target = loaded.float().eval()
        own = self.raw.get("dflash_config", {})
        self.mask_token = own.get("mask_token_id", self.raw.get("mask_token_id"))
        read = self.raw.get("aux_hidden_state_layer_ids", [])
        self.layers = own.get("target_layer_ids", [layer - 1 for layer in read])

    @torch.no_grad()
    def logits(self, committed: list[int], depth: int) -> Tensor:
        """[depth, draft vocabulary], of the tokens behind the root, which ends `committed`."""
        context = self._context(committed[:-1])
        table = self.tensors.get("embed_tokens.weight", self.target.model.embed_tokens.weight)
        stream = table[[committed[-1], *[self.mask_token] * depth]]
        for layer in range(self.config["num_hidden_layers"]):
            stream = self._layer(f"layers.{layer}", stream, context)
        ids = torch.arange(self.config["vocab_size"])
        if "d2t" in self.tensors:
            ids = torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]
        head = self.tensors.get("lm_head.weight", self.target.lm_head.weight[ids])
        return self._norm("norm", stream)[1:] @ head.T

    def _context(self, tokens: list[int]) -> Tensor:
        before_norm: list[Tensor] = []
        hook = self.target.model.norm.register_forward_pre_hook(
            lambda module, args: before_norm.append(args[0])
        )
        out = self.target.model(torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        outputs = [*out.hidden_states[1:-1], *before_norm]
        features = torch.cat([outputs[layer][0] for layer in self.layers], dim=-1)
        return self._norm("hidden_norm", features @ self.tensors["fc.weight"].T)

    def _layer(self, name: str, stream: Tensor, context: Tensor) -> Tensor:
        config, size = self.config, self.config["head_dim"]
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        read = self._norm(f"{name}.input_layernorm", stream)
        seen, count = torch.cat([context, read]), len(context)
        q, k, v = (
            (rows @ self.tensors[f"{name}.self_attn.{part}_proj.weight"].T).view(-1, heads, size)
            for part, rows, heads in (
                ("q", read, config["num_attention_heads"]),
                ("k", seen, config["num_key_value_heads"]),
                ("v", seen, config["num_key_value_heads"]),
            )
        )
        q = self._rotate(self._norm(f"{name}.self_attn.q_norm", q), count)
        k = self._rotate(self._norm(f"{name}.self_attn.k_norm", k), 0)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = (torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)).softmax(-1)
        heads = torch.einsum("hqk,khd->qhd", weights, v).reshape(len(read), -1)
        stream = stream + heads @ self.tensors[f"{name}.self_attn.o_proj.weight"].T
        normed = self._norm(f"{name}.post_attention_layernorm", stream)
        gate, up = (normed @ self.tensors[f"{name}.mlp.{x}_proj.weight"].T for x in ("gate", "up"))
        return stream + (F.silu(gate) * up) @ self.tensors[f"{name}.mlp.down_proj.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config.get("rms_norm_eps", 1e-6)
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.tensors[f"{name}.weight"]

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        """[T, heads, D] at positions first .. first + T - 1; pairs (i, i + D / 2)."""
        half = x.shape[-1] // 2
        places = torch.arange(first, first + len(x))[:, None, None]
        theta = self.config.get("rope_theta", 10000.0)
        angles = places / theta ** (torch.arange(half) / half)
        left, right = x.chunk(2, dim=-1)
        turned = [left * angles.cos() - right * angles.sin()]
        turned += [right * angles.cos() + left * angles.sin()]
        return torch.cat(turned, dim=-1)
