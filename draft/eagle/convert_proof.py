"""Proof that two checkpoints of EAGLE-3 are one draft: both are loaded as the engine loads them,
and give the same logits for the same random inputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.core.config import EngineConfig, ModelConfig, SpecConfig
from specengine.core.errors import ModelLoadError
from specengine.draft.eagle.load import load_eagle, load_eagle3
from specengine.draft.eagle.model import Eagle3Model
from specengine.draft.loaded import DraftTarget, LoadedDraft
from specengine.layers.embedding import VocabEmbedding
from specengine.layers.head import Head
from specengine.layers.linear import LMHead
from specengine.memory.kv_cache import MHATokenToKVPool
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.runner.attention import make_attention_backend
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.model_runner import MemoryPools, ModelRunner

_ROWS = 24  # of random features, as after a prefill
_STEPS = 4  # that continue the draft's own state
_ROUNDING = 1e-5  # of sums in float32, relative to the largest logit
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TargetMeasures:
    """num_layers: at least as many as the draft reads outputs of. head: [vocab_size, hidden_size],
    the target's own; None is a random one."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    head: Tensor | None = None


@dataclass(frozen=True)
class Proof:
    """largest: the largest difference of any two logits; largest_logit: of any logit itself."""

    num_rows: int
    num_tokens: int  # of the draft's vocabulary
    largest: float
    largest_logit: float
    feature_layers: tuple[int, ...]  # outputs, counted from 0

    def __str__(self) -> str:
        return (
            f"{self.num_rows} rows of {self.num_tokens} logits up to {self.largest_logit:.3g}, in "
            f"float32: largest difference {self.largest:g}; the same target tokens; both read the "
            f"outputs of layers {list(self.feature_layers)}, counted from 0"
        )


@dataclass(frozen=True)
class _Answer:
    logits_TV: Tensor
    target_ids: Tensor
    feature_layers: tuple[int, ...]


def prove(first: Path, second: Path, measures: TargetMeasures) -> Proof:
    """Raises ModelLoadError where the two differ in anything; where one uses the target's head and
    the other rows of it, in more than how products of other shapes are rounded."""
    one, other = _answer(first, measures), _answer(second, measures)
    if one.feature_layers != other.feature_layers:
        raise ModelLoadError(
            f"{first} reads the outputs of layers {list(one.feature_layers)} and {second} those of "
            f"{list(other.feature_layers)}"
        )
    if not torch.equal(one.target_ids, other.target_ids):
        raise ModelLoadError(f"the tokens of {first} and {second} map to different target tokens")
    largest = float((one.logits_TV - other.logits_TV).abs().max())
    largest_logit = float(one.logits_TV.abs().max())
    allowed = 0.0 if measures.head is None else _ROUNDING * largest_logit
    if not torch.isfinite(one.logits_TV).all() or largest > allowed:
        raise ModelLoadError(f"the logits of {first} and {second} differ by up to {largest:g}")
    return Proof(
        num_rows=len(one.logits_TV),
        num_tokens=one.logits_TV.shape[1],
        largest=largest,
        largest_logit=largest_logit,
        feature_layers=one.feature_layers,
    )


def require_loads(directory: Path, measures: TargetMeasures, is_eagle3: bool) -> None:
    """Load a draft of EAGLE or EAGLE-3 as the engine does. Raises ModelLoadError."""
    load = load_eagle3 if is_eagle3 else load_eagle
    load(_stand_in(directory, measures))


@torch.inference_mode()
def _answer(directory: Path, measures: TargetMeasures) -> _Answer:
    draft = load_eagle3(_stand_in(directory, measures))
    model = cast(Eagle3Model, draft.models[0])
    generator = torch.Generator().manual_seed(0)
    size = measures.hidden_size * len(draft.feature_layers)
    features = model.fuse(torch.randn(_ROWS, size, generator=generator))
    tokens = torch.randint(measures.vocab_size, (_ROWS + _STEPS,), generator=generator)
    runner, states, logits = _runner(draft), features, []
    for step in range(1 + _STEPS):
        begin, end = (0, _ROWS) if step == 0 else (_ROWS + step - 1, _ROWS + step)
        batch = runner.new_forward_batch(_rows(tokens[begin:end], begin))
        batch.features = states
        output = runner.forward(batch)
        assert output.hidden is not None
        logits.append(output.logits)
        states = output.hidden[-1:]
    ids = torch.arange(model.vocab_size) if model.target_ids is None else model.target_ids
    return _Answer(torch.cat(logits), ids, draft.feature_layers)


def _rows(tokens: Tensor, begin: int) -> ModelWorkerBatch:
    """Further rows of one request."""
    return ModelWorkerBatch(
        forward_mode=ForwardMode.DRAFT_EXTEND if len(tokens) > 1 else ForwardMode.DECODE,
        input_ids=tokens,
        req_pool_indices=[1],
        prefix_lens=[begin],
        extend_lens=[len(tokens)],
        logits_rows=None,
        sampling=None,
    )


def _runner(draft: LoadedDraft) -> ModelRunner:
    count = _ROWS + _STEPS
    table = ReqToTokenPool(1, count, _CPU)
    table.req_to_token[1] = torch.arange(1, count + 1)
    kv = MHATokenToKVPool(count + 1, draft.kv_shape, _CPU)
    backend = make_attention_backend("torch", _CPU)
    return ModelRunner(draft.models[0], _CPU, MemoryPools(table, kv), backend)


def _stand_in(directory: Path, measures: TargetMeasures) -> DraftTarget:
    """A target with a random embedding and head, for drafts that bring none."""
    generator = torch.Generator().manual_seed(1)
    shape = measures.vocab_size, measures.hidden_size
    embedding, head = VocabEmbedding(*shape), LMHead(shape[1], shape[0])
    embedding.weight.copy_(torch.randn(shape, generator=generator))
    random = torch.randn(shape, generator=generator)
    head.plain.copy_(random if measures.head is None else measures.head)
    model: Any = SimpleNamespace(
        num_layers=measures.num_layers,
        vocab_size=measures.vocab_size,
        embed=embedding,
        head=Head(head),
    )
    source = ModelSource("stand-in", SimpleNamespace(hidden_size=measures.hidden_size))
    config = EngineConfig(model=ModelConfig(device="cpu", dtype="float32"))
    return DraftTarget(
        spec=SpecConfig(algorithm="EAGLE3", draft_model_path=str(directory)),
        loaded=LoadedModel(source, config, model, None),
        context_length=_ROWS + _STEPS,
        dtype=torch.float32,
        find_model_class=lambda architectures: None,
    )
