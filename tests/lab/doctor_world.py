"""A small random target, and an EAGLE-3 drafter that has its greedy texts by heart.

Seconds of plain PyTorch. Features of other layers, other norms or another order are news to it.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, silu
from torch.nn.utils.rnn import pad_sequence

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.config_sources import config_from_flags
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.lab.doctor.hypothesis import View
from specengine.lab.doctor.target_rows import TargetForward, TargetRows
from specengine.lab.doctor.texts import render, served_template, write_texts
from tests.draft.eagle_checkpoints import save

PROMPTS = ["rain", "a lamp", "why?", "two and two", "north", "sing"]
NEW_TOKENS = 40
FEATURE_LAYERS = (1, 3, 4)
SIZE, HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 16, 96
THETA = 10_000.0
LEVELS = 3
_NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")


def config_of(target: Path, draft: Path | None = None, **flags: Any) -> EngineConfig:
    spec = SpecConfig(draft_model_path=None if draft is None else str(draft))
    given = {"model": str(target), "dtype": "float32", "device": "cpu", **flags}
    return config_from_flags(given, spec)


def save_target(folder: Path, tokenizer_from: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(tokenizer_from, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=320,
        hidden_size=SIZE,
        intermediate_size=112,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=0,
        bos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def tokenizer_of(target: Path) -> Any:
    return load(config_of(target), Phases()).tokenizer


def texts_of(target: Path, **flags: Any) -> list[TargetRows]:
    """What the doctor will judge by."""
    loaded = load(config_of(target, **flags), Phases())
    prompts = render(loaded.tokenizer, PROMPTS, served_template(loaded.tokenizer))
    texts = write_texts(loaded, prompts, NEW_TOKENS)
    forward = TargetForward(loaded, 512)
    return [forward.rows(text) for text in texts]


@dataclass(frozen=True)
class Lessons:
    """[B, n] each, features [B, n, 3 H]; padded on the right."""

    features: Tensor
    tokens: Tensor
    greedy: Tensor
    counts: Tensor  # bool, rows that are answered

    @classmethod
    def of(cls, texts: list[TargetRows]) -> Lessons:
        features = [rows.layers[:, list(FEATURE_LAYERS)].flatten(1).clone() for rows in texts]
        counts = []
        for rows in texts:
            places = torch.arange(len(rows.tokens))
            counts.append((places >= rows.text.prompt_len - 1) & (places < len(places) - LEVELS))
        return cls(
            pad_sequence(features, batch_first=True),
            pad_sequence([rows.tokens for rows in texts], batch_first=True),
            pad_sequence([rows.greedy.clone() for rows in texts], batch_first=True),
            pad_sequence(counts, batch_first=True),
        )


class Student:
    """EAGLE-3's equations, trained level by level on itself; tensors by their checkpoint's name."""

    def __init__(self, target: Path, draft_ids: Tensor) -> None:
        torch.manual_seed(1)
        self.ids = draft_ids
        self.embed = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        wide = HEADS * HEAD_DIM
        shapes = {
            "fc": (SIZE, len(FEATURE_LAYERS) * SIZE),
            "midlayer.self_attn.q_proj": (wide, 2 * SIZE),
            "midlayer.self_attn.k_proj": (wide, 2 * SIZE),
            "midlayer.self_attn.v_proj": (wide, 2 * SIZE),
            "midlayer.self_attn.o_proj": (SIZE, wide),
            "midlayer.mlp.gate_proj": (INTERMEDIATE, SIZE),
            "midlayer.mlp.up_proj": (INTERMEDIATE, SIZE),
            "midlayer.mlp.down_proj": (SIZE, INTERMEDIATE),
            "lm_head": (len(draft_ids), SIZE),
        }
        self.tensors = {name: torch.randn(one) / math.sqrt(one[1]) for name, one in shapes.items()}
        self.tensors |= {name: 0.5 + 1.5 * torch.rand(SIZE) for name in (*_NORMS, "norm")}

    def learn(self, lessons: Lessons, view: View, steps: int) -> None:
        for tensor in self.tensors.values():
            tensor.requires_grad_()
        optimizer = torch.optim.Adam(self.tensors.values(), lr=3e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(lessons, view).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def loss(self, lessons: Lessons, view: View) -> Tensor:
        count = lessons.tokens.shape[1]
        labels = torch.searchsorted(self.ids, lessons.greedy)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states = self.linear("fc", lessons.features)
        loss = torch.zeros(())
        for level in range(LEVELS):
            tokens = lessons.tokens.roll(-(1 + level + view.token_shift), dims=1)
            wanted = labels.roll(-(1 + level + view.label_shift), dims=1)
            positions = torch.arange(count) + level * view.position_step
            states = self.layer(states, tokens, positions, keys, values)
            logits = self.linear("lm_head", self.norm("norm", states))
            loss = loss + cross_entropy(logits[lessons.counts], wanted[lessons.counts])
        return loss

    def layer(
        self,
        states: Tensor,
        tokens: Tensor,
        positions: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        embedded = self.norm(_NORMS[0], self.embed[tokens])
        read = torch.cat([embedded, self.norm(_NORMS[1], states)], dim=-1)
        q, k, v = (
            self.linear(f"midlayer.self_attn.{name}_proj", read).view(
                *tokens.shape, HEADS, HEAD_DIM
            )
            for name in "qkv"
        )
        q = rotate(q, positions)
        keys.append(rotate(k, positions))
        values.append(v)
        heads = attend(q, keys, values).flatten(2)
        states = states + self.linear("midlayer.self_attn.o_proj", heads)
        normed = self.norm(_NORMS[2], states)
        gate = silu(self.linear("midlayer.mlp.gate_proj", normed))
        inner = gate * self.linear("midlayer.mlp.up_proj", normed)
        return states + self.linear("midlayer.mlp.down_proj", inner)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.tensors[name])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.tensors[name]

    def save(self, folder: Path) -> Path:
        tensors = {f"{name}.weight": one.detach().clone() for name, one in self.tensors.items()}
        tensors["d2t"] = self.ids - torch.arange(len(self.ids))
        tensors["t2d"] = torch.zeros(len(self.embed), dtype=torch.bool).index_fill(
            0, self.ids, True
        )
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": SIZE,
            "intermediate_size": INTERMEDIATE,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_DIM,
            "num_hidden_layers": 1,
            "vocab_size": len(self.embed),
            "draft_vocab_size": len(self.ids),
            "rms_norm_eps": 1e-5,
            "rope_theta": THETA,
            "max_position_embeddings": 512,
            "hidden_act": "silu",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS)},
        }
        return save(folder, tensors, config)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """[B, n, heads, D]. Row i sees rows 0 to i of the first level, and rows i of the others."""
    scale, count = 1 / math.sqrt(HEAD_DIM), q.shape[1]
    scores = torch.einsum("bihd,bjhd->bhij", q, keys[0]) * scale
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    parts = [scores.masked_fill(later, float("-inf"))]
    parts += [torch.einsum("bihd,bihd->bhi", q, k)[..., None] * scale for k in keys[1:]]
    weights = torch.cat(parts, dim=-1).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights[..., :count], values[0])
    for place, v in enumerate(values[1:]):
        out = out + weights[..., count + place].transpose(1, 2)[..., None] * v
    return out


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """[B, n, heads, D]; pairs (i, i + D / 2)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / THETA ** (torch.arange(half) / half)
    left, right = x.chunk(2, dim=-1)
    turned = [left * angles.cos() - right * angles.sin()]
    return torch.cat([*turned, right * angles.cos() + left * angles.sin()], dim=-1)


def train(
    folder: Path, target: Path, texts: list[TargetRows], view: View | None = None, steps: int = 100
) -> Path:
    said = torch.tensor(sorted(set(torch.cat([rows.greedy for rows in texts]).tolist())))
    student = Student(target, said)
    student.learn(Lessons.of(texts), view or View(), steps)
    return student.save(folder)
