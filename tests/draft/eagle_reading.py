"""EAGLE's and EAGLE-3's equations, read plainly from a checkpoint's own tensors and the hidden
states of transformers' target. Shares no code with the models under test."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

_IDS = "eagle_aux_hidden_state_layer_ids"


Tokens = tuple[int, ...]
Seen = tuple[dict[int, tuple[Tensor, Tensor]], Tensor]  # keys and values by layer, and states


class EagleReading:
    """Drafts for one request at a time, from the start of its text. What belongs to the beginnings
    of a text is read once, with the whole."""

    def __init__(self, draft: Path, target: Path) -> None:
        import transformers

        self.raw = json.loads((draft / "config.json").read_text())
        self.config = self.raw.get("transformer_layer_config", self.raw)
        named = load_file(draft / "model.safetensors")
        self.tensors = {
            _plain_name(name): one.float() if one.is_floating_point() else one
            for name, one in named.items()
        }
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(target)
        self.target = loaded.float().eval()
        self.is_eagle3 = "layers.0.hidden_norm.weight" in self.tensors
        self.head, self.target_ids = self._head_and_ids()
        self.texts: dict[Tokens, Seen] = {}
        self.done: dict[tuple[Tokens, Tokens], Seen] = {}  # by text and drafted tokens

    @torch.no_grad()
    def logits(self, committed: list[int], drafted: list[int]) -> Tensor:
        """[1 + len(drafted), draft vocabulary]: of the token after the root, which ends
        `committed`, and after each of the drafted ones."""
        text = tuple(committed)
        ends = [tuple(drafted[:count]) for count in range(len(drafted) + 1)]
        states = torch.cat([self._after(text, end)[1] for end in ends])
        if self.is_eagle3 and not self.raw.get("norm_output"):
            states = self._norm("norm", states)
        return states @ self.head.T

    @torch.no_grad()
    def read(self, texts: Iterable[Sequence[int]]) -> None:
        """Before their beginnings are asked for."""
        for text in sorted({tuple(text) for text in texts}, key=len, reverse=True):
            self._begin(text)

    def _begin(self, text: Tokens) -> Seen:
        """Rows of a text, or of one that begins with it."""
        for whole, seen in self.texts.items():
            if whole[: len(text)] == text:
                return seen
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer
        states = self._rows(self._features(list(text[:-1])), list(text[1:]))
        self.texts[text] = self.cached, states
        return self.texts[text]

    def _after(self, text: Tokens, drafted: Tokens) -> Seen:
        """The state of the last row alone."""
        if (text, drafted) not in self.done:
            if drafted:
                cached, states = self._after(text, drafted[:-1])
                self.cached = dict(cached)
                states = self._rows(states, [drafted[-1]])
            else:
                cached, states = self._begin(text)
                count = len(text) - 1
                self.cached = {i: (k[:count], v[:count]) for i, (k, v) in cached.items()}
                states = states[count - 1 : count]
            self.done[text, drafted] = self.cached, states
        return self.done[text, drafted]

    def _features(self, tokens: list[int]) -> Tensor:
        """[T, H]"""
        before_norm: list[Tensor] = []
        hook = self.target.model.norm.register_forward_pre_hook(
            lambda module, args: before_norm.append(args[0])
        )
        out = self.target.model(torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        own = self.raw.get("eagle_config") or {}
        if not self.is_eagle3 or own.get("use_aux_hidden_state") is False:
            last: Tensor = out.last_hidden_state[0]
            return last
        # hidden_states[n] is what layer n reads, and the last of them is normed already.
        outputs = [*out.hidden_states[1:-1], *before_norm]
        if "eagle_config" in self.raw:
            layers = self.raw["eagle_config"][_IDS]
        else:
            layers = [layer - 1 for layer in self.raw[_IDS]]
        parts = [outputs[layer][0] for layer in layers]
        if "fc_norm.0.weight" in self.tensors:
            parts = [self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)]
        features = torch.cat(parts, dim=-1)
        if "input_norm.weight" in self.tensors:
            features = self._norm("input_norm", features)
        return self._linear("fc", features) if "fc.weight" in self.tensors else features

    def _rows(self, states: Tensor, tokens: list[int]) -> Tensor:
        """Further rows of the draft model, which see those run before: [T, H] -> [T, H]."""
        table = self.tensors.get("embed_tokens.weight", self.target.model.embed_tokens.weight)
        embeddings = table[tokens]
        if not self.is_eagle3:
            embeddings = self._norm_if_there("embed_norm", embeddings)
            stream = self._linear("fc", torch.cat([embeddings, states], dim=-1))
            read = self._norm_if_there("layers.0.input_layernorm", stream)
            return self._norm_if_there("norm", self._layer(0, read, stream))
        normed = self._norm("layers.0.hidden_norm", states)
        read = torch.cat([self._norm("layers.0.input_layernorm", embeddings), normed], dim=-1)
        out = self._layer(0, read, normed if self.raw.get("norm_before_residual") else states)
        for layer in range(1, self.config["num_hidden_layers"]):
            out = self._layer(layer, self._norm(f"layers.{layer}.input_layernorm", out), out)
        return self._norm("norm", out) if self.raw.get("norm_output") else out

    def _layer(self, layer: int, read: Tensor, stream: Tensor) -> Tensor:
        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        old_keys, old_values = self.cached.get(layer, (torch.empty(0), torch.empty(0)))
        done, new, size = len(old_keys), len(read), self.config["head_dim"]
        positions = torch.arange(done, done + new)
        q, k, v = (
            self._linear(f"layers.{layer}.self_attn.{name}_proj", read).view(new, -1, size)
            for name in "qkv"
        )
        cached = (torch.cat([old_keys, self._rotate(k, positions)]), torch.cat([old_values, v]))
        self.cached[layer] = cached
        keys, values = (x.repeat_interleave(group, dim=1) for x in cached)
        scores = torch.einsum("qhd,khd->hqk", self._rotate(q, positions), keys) / math.sqrt(size)
        behind = positions[:, None] - torch.arange(done + new)
        unseen = (behind < 0) | (behind >= self._window(layer))
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        heads = torch.einsum("hqk,khd->qhd", weights, values).reshape(new, -1)
        stream = stream + self._linear(f"layers.{layer}.self_attn.o_proj", heads)
        normed = self._norm(f"layers.{layer}.post_attention_layernorm", stream)
        gate = F.silu(self._linear(f"layers.{layer}.mlp.gate_proj", normed))
        up = self._linear(f"layers.{layer}.mlp.up_proj", normed)
        return stream + self._linear(f"layers.{layer}.mlp.down_proj", gate * up)

    def _window(self, layer: int) -> float:
        types = self.config.get("layer_types")
        slides = types is not None and types[layer] == "sliding_attention"
        return self.config["sliding_window"] if slides else math.inf

    def _head_and_ids(self) -> tuple[Tensor, Tensor]:
        """The head's rows, and the target's token of each."""
        of_target: Tensor = self.target.lm_head.weight.detach()
        own = self.tensors.get("lm_head.weight")
        if "d2t" not in self.tensors:
            head = of_target if own is None else own
            return head, torch.arange(len(head))
        ids = torch.arange(len(self.tensors["d2t"])) + self.tensors["d2t"]
        return of_target[ids] if own is None else own, ids

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean: Tensor = x.pow(2).mean(-1, keepdim=True)
        weight: Tensor = self.tensors[f"{name}.weight"]
        return x / (mean + float(self.config["rms_norm_eps"])).sqrt() * weight

    def _norm_if_there(self, name: str, x: Tensor) -> Tensor:
        return self._norm(name, x) if f"{name}.weight" in self.tensors else x

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, heads, D]; pairs (i, i + D / 2)."""
        half = x.shape[-1] // 2
        angles = positions[:, None, None] / self.config["rope_theta"] ** (torch.arange(half) / half)
        left, right = x.chunk(2, dim=-1)
        turned = [left * angles.cos() - right * angles.sin()]
        turned += [right * angles.cos() + left * angles.sin()]
        return torch.cat(turned, dim=-1)


def _plain_name(name: str) -> str:
    """SGLang's and speculators' names as one."""
    ours = {
        "midlayer": "layers.0",
        "transformer": "layers.0",
        "fusion_fc": "fc",
        "embedding_layernorm": "embed_norm",
        "pre_lm_head_layernorm": "norm",
    }
    first, _, rest = name.removeprefix("model.").partition(".")
    return f"{ours.get(first, first)}.{rest}" if rest else first
