"""What drafters learn from: the target as it serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.core.errors import ConfigError, DataError
from specengine.draft.train.data.packing import PackedBatch
from specengine.draft.train.features import FeatureCache, TeacherOutput
from specengine.memory.kv_cache import MHATokenToKVPool
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.runner.attention import make_attention_backend
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.memory.kept_state import state_shape_of
from specengine.runner.memory.kv_shape import kv_shape_of
from specengine.runner.model_runner import MemoryPools, ModelRunner
from specengine.runner.worker import TpModelWorker

_MAX_DOCUMENTS = 1024  # a forward
_MAX_STATES = 64  # the same, of targets that keep recurrent state of each


class Teacher:
    """Runs the serving runner in EXTEND over whole documents, on a page table and KV memory of its
    own: what drafters learn from is what their workers are handed.

    feature_layers: ascending, counted from 0 by their output. max_tokens: of a forward; longer
    batches take several. cache_mb: memory, in MiB, for outputs of documents that come again.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        feature_layers: tuple[int, ...] = (),
        max_tokens: int = 32_768,
        cache_mb: int = 0,
    ) -> None:
        self.loaded = loaded
        self.model = cast(Any, loaded.model)
        self.config = loaded.source.hf_config
        self.device = loaded.device
        self.embed_table: Tensor = self.model.model.embed_tokens.weight.detach()  # [V, H]
        self.feature_layers = feature_layers
        self.max_tokens = max_tokens
        self.cache = FeatureCache(cache_mb * 2**20) if cache_mb else None
        self.context_length = min(loaded.source.context_length, max_tokens)
        count = loaded.model.num_layers
        if any(not 0 <= layer < count for layer in feature_layers):
            found = list(feature_layers)
            raise ConfigError(f"feature layers {found}: the target has layers 0..{count - 1}")
        has_states = state_shape_of(loaded.model) is not None
        self.max_documents = _MAX_STATES if has_states else _MAX_DOCUMENTS
        self.rows = ReqToTokenPool(self.max_documents, self.context_length, self.device)
        kv_shape = kv_shape_of([loaded.model], self.dtype)
        pools = MemoryPools(self.rows, MHATokenToKVPool(max_tokens + 1, kv_shape, self.device))
        backend = make_attention_backend(loaded.config.model.attention_backend, self.device)
        self.worker = TpModelWorker(
            ModelRunner(loaded.model, self.device, pools, backend, feature_layers)
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_table.dtype

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return self.loaded.model.vocab_size

    @torch.no_grad()
    def forward(self, batch: PackedBatch) -> TeacherOutput:
        """Raises DataError for a document that is longer than the context."""
        if self.cache is None:
            return self._run(batch.input_ids, batch.lens)
        return self.cache.forward(batch.input_ids, batch.lens, self._run)

    def _run(self, input_ids: Tensor, all_lens: list[int]) -> TeacherOutput:
        size, count = self.hidden_size, len(input_ids)
        shape = (count, len(self.feature_layers) * size)
        features = torch.empty(shape, dtype=self.dtype, device=self.device)
        hidden = torch.empty(count, size, dtype=self.dtype, device=self.device)
        begin = 0
        for lens in self._parts(all_lens):
            rows = slice(begin, begin + sum(lens))
            # A loop's autocast would compute otherwise than serving does.
            with torch.autocast(self.device.type, enabled=False):
                output = self.worker.forward_batch_generation(
                    self._worker_batch(input_ids[rows], lens)
                )
            assert output.hidden is not None
            hidden[rows] = output.hidden
            if output.features is not None:
                features[rows] = output.features
            begin = rows.stop
        return TeacherOutput(features, hidden)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V]."""
        with torch.autocast(self.device.type, enabled=False):
            logits: Tensor = self.model.head.logits(hidden)
        return logits

    def head_table(self) -> Tensor:
        """float32 [V, H], the head's rows, whatever form they are packed in: its answers to the
        unit vectors."""
        return self.logits(torch.eye(self.hidden_size, dtype=self.dtype, device=self.device)).T

    def final_norm(self) -> Tensor:
        """[H], the weight of the norm in front of the head."""
        weight: Tensor = self.model.model.norm.weight.detach()
        return weight

    def _parts(self, lens: list[int]) -> Iterator[list[int]]:
        """Lengths of consecutive documents that fit into one forward."""
        part: list[int] = []
        for length in lens:
            if length > self.context_length:
                raise DataError(
                    f"a document of {length} tokens exceeds the {self.context_length} positions of "
                    "the target; make the data set with shorter ones"
                )
            if part and (sum(part) + length > self.max_tokens or len(part) == self.max_documents):
                yield part
                part = []
            part.append(length)
        if part:
            yield part

    def _worker_batch(self, input_ids: Tensor, lens: list[int]) -> ModelWorkerBatch:
        """Document after document in rows 1, 2, ... and slots 1, 2, ... of the teacher's own."""
        first = 1
        for row, length in enumerate(lens, start=1):
            slots = np.arange(first, first + length, dtype=np.int32)
            self.rows.write(row, 0, slots)
            first += length
        self.rows.flush()
        return ModelWorkerBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=input_ids,
            req_pool_indices=list(range(1, len(lens) + 1)),
            prefix_lens=[0] * len(lens),
            extend_lens=list(lens),
            logits_rows=[],
            sampling=None,
        )
