"""A plain-PyTorch reading of dense decoders and of their MTP layers, and checkpoints to read.

Nothing here is shared with the engine: one sequence at a time, no cache, every equation as the
formats' sources state it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
FORMS = ("deepseek", "qwen3_next", "mimo", "ernie")


@dataclass
class Reading:
    """A checkpoint directory, read."""

    config: dict[str, Any]
    weights: Weights

    @classmethod
    def of(cls, directory: Path) -> Reading:
        config = json.loads((directory / "config.json").read_text())
        return cls(config, load_file(directory / "model.safetensors"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config["rms_norm_eps"]
        scaled: Tensor = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return scaled * self.weights[name + ".weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def embed(self, tokens: Sequence[int]) -> Tensor:
        return self.weights["model.embed_tokens.weight"][list(tokens)]

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weights.get("lm_head.weight", self.embed_table).T

    @property
    def embed_table(self) -> Tensor:
        return self.weights["model.embed_tokens.weight"]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, heads, D]; pairs (i, i + D / 2)."""
        half = x.shape[-1] // 2
        theta = self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]
        angles = positions[:, None, None] / theta ** (torch.arange(half) / half)
        left, right = x[..., :half], x[..., half:]
        turned = [
            left * angles.cos() - right * angles.sin(),
            right * angles.cos() + left * angles.sin(),
        ]
        return torch.cat(turned, dim=-1)

    def heads(self, x: Tensor, name: str, positions: Tensor | None) -> Tensor:
        dim = self.config.get("head_dim") or (
            self.config["hidden_size"] // self.config["num_attention_heads"]
        )
        out = self.linear(x, f"{name}_proj").view(len(x), -1, dim)
        if f"{name}_norm.weight" in self.weights:
            out = self.norm(out, f"{name}_norm")
        return out if positions is None else self.rotate(out, positions)

    def layer(self, x: Tensor, name: str) -> Tensor:
        """A pre-norm decoder layer over rows at positions 0, 1, ..."""
        positions = torch.arange(len(x))
        normed = self.norm(x, f"{name}.input_layernorm")
        q = self.heads(normed, f"{name}.self_attn.q", positions)
        k = self.heads(normed, f"{name}.self_attn.k", positions)
        v = self.heads(normed, f"{name}.self_attn.v", None)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        causal = torch.ones(len(x), len(x)).tril().bool()
        shares = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
        x = x + self.linear(out, f"{name}.self_attn.o_proj")
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        gate = F.silu(self.linear(normed, f"{name}.mlp.gate_proj"))
        up = self.linear(normed, f"{name}.mlp.up_proj")
        return x + self.linear(gate * up, f"{name}.mlp.down_proj")

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """The target's states after its final norm, [T, H]."""
        x = self.embed(tokens)
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(x, f"model.layers.{number}")
        return self.norm(x, "model.norm")

    def deepseek(self, tokens: Sequence[int], hidden: Tensor, index: int) -> Tensor:
        """tokens: of each row the next; hidden: the state each row continues -> states [T, H]."""
        name = f"model.layers.{self.config['num_hidden_layers'] + index}"
        embedded = self.weights.get(f"{name}.embed_tokens.weight", self.embed_table)[list(tokens)]
        pair = [self.norm(embedded, f"{name}.enorm"), self.norm(hidden, f"{name}.hnorm")]
        x = self.linear(torch.cat(pair, dim=-1), f"{name}.eh_proj")
        return self.norm(self.layer(x, name), f"{name}.shared_head.norm")

    def qwen3_next(self, tokens: Sequence[int], hidden: Tensor, index: int) -> Tensor:
        embedded = self.norm(self.embed(tokens), "mtp.pre_fc_norm_embedding")
        pair = [embedded, self.norm(hidden, "mtp.pre_fc_norm_hidden")]
        x = self.linear(torch.cat(pair, dim=-1), "mtp.fc")
        return self.norm(self.layer(x, f"mtp.layers.{index}"), "mtp.norm")

    def mimo(self, tokens: Sequence[int], hidden: Tensor, index: int) -> Tensor:
        name = f"model.mtp_layers.{index}"
        embedded = self.norm(self.embed(tokens), f"{name}.token_layernorm")
        pair = [self.norm(hidden, f"{name}.hidden_layernorm"), embedded]
        x = self.linear(torch.cat(pair, dim=-1), f"{name}.input_proj")
        return self.norm(self.layer(x, name), f"{name}.final_layernorm")

    def ernie(self, tokens: Sequence[int], hidden: Tensor, index: int) -> Tensor:
        """As Baidu's FastDeploy has it: the target's norm is behind the layer."""
        embedded = self.norm(self.embed(tokens), f"model.mtp_emb_norm.{index}")
        pair = [embedded, self.norm(hidden, f"model.mtp_hidden_norm.{index}")]
        x = self.linear(torch.cat(pair, dim=-1), f"model.mtp_linear_proj.{index}")
        return self.norm(self.layer(x, f"model.mtp_block.{index}"), "model.norm")

    def mtp(self, form: str, tokens: Sequence[int], hidden: Tensor, index: int = 0) -> Tensor:
        states: Tensor = getattr(self, form)(tokens, hidden, index)
        return states

    def mtp_head(self, form: str, states: Tensor, index: int = 0) -> Tensor:
        name = f"model.layers.{self.config['num_hidden_layers'] + index}.shared_head.head.weight"
        own = self.weights.get(name) if form == "deepseek" else None
        return self.head(states) if own is None else states @ own.T


def add_mtp(
    target: Path, folder: Path, form: str, layers: int = 1, own_tables: bool = False
) -> Path:
    """A copy of a target's directory in `folder`, with random MTP layers in its checkpoint.

    own_tables: DeepSeek's form with an embedding and a head that differ from the target's.
    """
    shutil.copytree(target, folder, dirs_exist_ok=True)
    reading = Reading.of(folder)
    torch.manual_seed(len(form) + layers)
    for index in range(layers):
        reading.weights |= _layer_weights(reading, form, index)
        if own_tables:
            name = f"model.layers.{reading.config['num_hidden_layers'] + index}"
            for table in ("embed_tokens", "shared_head.head"):
                random = torch.randn_like(reading.embed_table) * 0.12
                reading.weights[f"{name}.{table}.weight"] = random
    save_file(reading.weights, folder / "model.safetensors")
    reading.config["num_nextn_predict_layers"] = layers
    if form == "mimo":
        reading.config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(reading.config))
    return folder


def _layer_weights(reading: Reading, form: str, index: int) -> Weights:
    """Random tensors, shaped as in the target's first layer where they are of a decoder layer."""
    size, first = reading.config["hidden_size"], reading.config["num_hidden_layers"]
    layer, own, shared = {
        "deepseek": (
            f"model.layers.{first + index}",
            {"eh_proj": 2, "enorm": 1, "hnorm": 1, "shared_head.norm": 1},
            {},
        ),
        "qwen3_next": (
            f"mtp.layers.{index}",
            {},
            {"fc": 2, "norm": 1, "pre_fc_norm_embedding": 1, "pre_fc_norm_hidden": 1},
        ),
        "mimo": (
            f"model.mtp_layers.{index}",
            {"input_proj": 2, "token_layernorm": 1, "hidden_layernorm": 1, "final_layernorm": 1},
            {},
        ),
        "ernie": (f"model.mtp_block.{index}", {}, {}),
    }[form]
    shapes = {
        name.replace("model.layers.0", layer): tensor.shape
        for name, tensor in reading.weights.items()
        if name.startswith("model.layers.0.")
    }
    parts = {f"{layer}.{name}": rank for name, rank in own.items()}
    parts |= {f"mtp.{name}": rank for name, rank in shared.items()}
    if form == "ernie":
        ranks = {"emb_norm": 1, "hidden_norm": 1, "linear_proj": 2}
        parts |= {f"model.mtp_{name}.{index}": rank for name, rank in ranks.items()}
    shapes |= {
        f"{name}.weight": torch.Size([size, 2 * size] if rank == 2 else [size])
        for name, rank in parts.items()
    }
    return {name: _random(name, shape) for name, shape in shapes.items()}


def _random(name: str, shape: torch.Size) -> Tensor:
    if len(shape) == 2:
        return torch.randn(shape) * 0.12
    return torch.randn(shape) * 0.2 + (0.0 if name.endswith("bias") else 1.0)
