"""A Llama to train: what target/models/llama.py serves, in differentiable PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from specengine.draft.train.layer import DraftLayer, DraftNorm
from specengine.draft.train.padded import PaddedDocuments
from specengine.layers.layer_spec import LayerSpec
from specengine.layers.rotary import RotaryEmbedding

T = TypeVar("T")

INITIAL_STD = 0.02


class LlamaStack(nn.Module):
    """`model.*` of a checkpoint."""

    def __init__(self, config: Any, compiles: bool) -> None:
        super().__init__()
        shape = LayerSpec.from_config(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            LlamaLayer(shape, compiles) for _ in range(config.num_hidden_layers)
        )
        self.norm = DraftNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, cos_sin: Tensor, documents: PaddedDocuments) -> Tensor:
        """int64 [T], float32 [T, head_dim] -> [T, H], after the final norm."""
        stream: Tensor = self.embed_tokens(input_ids)
        for layer in self.layers:
            stream = layer(stream, cos_sin, documents)
        out: Tensor = self.norm(stream)
        return out


class LlamaLayer(DraftLayer):
    def __init__(self, shape: LayerSpec, compiles: bool) -> None:
        super().__init__(shape, shape.hidden_size, has_hidden_norm=False)
        self.before: Callable[..., Any] = self._before
        self.after: Callable[..., Any] = self.finish
        if compiles:
            self.before = torch.compile(self._before, dynamic=True)
            self.after = torch.compile(self.finish, dynamic=True)

    def _before(self, stream: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv: tuple[Tensor, Tensor, Tensor] = self.self_attn(self.input_layernorm(stream), cos_sin)
        return qkv

    def forward(self, stream: Tensor, cos_sin: Tensor, documents: PaddedDocuments) -> Tensor:
        """The residual stream [T, H] in and out."""
        q, k, v = self.before(stream, cos_sin)
        out: Tensor = self.after(documents.attend(q, k, v), stream)
        return out


class Llama(nn.Module):
    """Parameters are called as in checkpoints. config: transformers' LlamaConfig.
    compiles: everything of a layer but attention."""

    cos_sin: Tensor

    def __init__(self, config: Any, compiles: bool = False) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaStack(config, compiles)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        table = RotaryEmbedding.from_config(config).cos_sin_cache
        self.register_buffer("cos_sin", table, persistent=False)
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        """GPT-2's initial weights (Radford et al. 2019): what adds to the residual stream starts
        smaller the more layers do."""
        depth = 2 * self.config.num_hidden_layers
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, INITIAL_STD * (depth**-0.5 if adds else 1.0))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lens: list[int],
        judge: Callable[[Tensor, Tensor], T],
    ) -> T:
        """int64 [T] each, tokens a document -> what `judge` makes of the hidden states after the
        final norm, [T, H], and the head [V, H]; here, because sharded weights are whole here."""
        documents = PaddedDocuments.of(lens, input_ids.device)
        hidden = self.model(input_ids, self.cos_sin[positions], documents)
        return judge(hidden, self.lm_head.weight)
