"""What the target's serving forward says about a text: outputs of every layer, and next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specengine.core.batch import AttentionBackend, ForwardMode, ModelWorkerBatch
from specengine.core.model import DecoderModel
from specengine.engine.resolve import torch_dtype
from specengine.lab.doctor.texts import Text
from specengine.memory.kv_cache import KVShape, MHATokenToKVPool
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.runner.attention import make_attention_backend
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.memory.kv_shape import kv_shape_of
from specengine.runner.model_runner import MemoryPools, ModelRunner


@dataclass(frozen=True)
class TargetRows:
    """tokens and greedy: int64 [n]; greedy[i] is the best token after tokens[: i + 1].
    layers: [n, L, H], outputs of every layer, residual included. final: [n, H], after the norm."""

    text: Text
    tokens: Tensor
    greedy: Tensor
    layers: Tensor
    final: Tensor


class TargetForward:
    """The model of an engine that keeps the output of every layer, in memory of its own."""

    def __init__(self, loaded: LoadedModel, max_tokens: int) -> None:
        model, dtype = loaded.model, torch_dtype(loaded.config.model.dtype)
        kv_shape = kv_shape_of([model], dtype)
        backend = make_attention_backend(loaded.config.model.attention_backend, loaded.device)
        layers = tuple(range(model.num_layers))
        self.runner = texts_runner(model, loaded.device, kv_shape, backend, 1, max_tokens, layers)

    def rows(self, text: Text) -> TargetRows:
        tokens = torch.tensor(text.token_ids, dtype=torch.int64)
        output = self.runner.forward(
            ModelWorkerBatch(
                forward_mode=ForwardMode.EXTEND,
                input_ids=tokens,
                req_pool_indices=[1],
                prefix_lens=[0],
                extend_lens=[len(tokens)],
                logits_rows=None,
                sampling=None,
            )
        )
        assert output.hidden is not None
        assert output.features is not None
        return TargetRows(
            text=text,
            tokens=tokens.to(self.runner.device),
            greedy=output.logits.argmax(-1),
            layers=output.features.view(len(tokens), self.runner.model.num_layers, -1),
            final=output.hidden,
        )


def texts_runner(
    model: DecoderModel,
    device: torch.device,
    kv_shape: KVShape,
    backend: AttentionBackend,
    num_texts: int,
    num_tokens: int,
    feature_layers: tuple[int, ...] = (),
) -> ModelRunner:
    """Rows 1 .. num_texts of its page table hold slots for num_tokens each."""
    table = ReqToTokenPool(num_texts, num_tokens, device)
    slots = torch.arange(1, num_texts * num_tokens + 1).view(num_texts, num_tokens)
    table.req_to_token[1:] = slots
    kv = MHATokenToKVPool(num_texts * num_tokens + 1, kv_shape, device)
    return ModelRunner(model, device, MemoryPools(table, kv), backend, feature_layers)
