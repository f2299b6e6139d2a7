"""Forwards that are prepared before their tokens are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ModelWorkerBatch, Tree
from specengine.core.interfaces import LogitsOutput
from specengine.runner.prefill_parts import joined, kept
from specengine.runner.ragged_forms import Form
from specengine.runner.ragged_graphs import CapturedForward, RaggedGraphRunner

if TYPE_CHECKING:
    from specengine.runner.model_runner import ModelRunner


class PreparedForward(Protocol):
    """A forward that lacks its tokens, and perhaps what its tree looks like. Once it has run, its
    requests' rows of the page table, and where their tokens end, lie on the device."""

    @property
    def input_ids(self) -> Tensor:
        """int64 [T], as they were given, on the host or the device."""
        ...

    @property
    def tree(self) -> Tree | None: ...

    @property
    def req_pool_indices(self) -> Tensor: ...

    @property
    def last_rows(self) -> Tensor:
        """int64 [B], of each request's last token."""
        ...

    def run(
        self,
        tokens_T: Tensor | None = None,
        features_TF: Tensor | None = None,
        last_B: Tensor | None = None,
    ) -> LogitsOutput:
        """tokens_T: None takes those of the batch; features_TF: what a drafter's model takes in
        beside them; last_B: on the device, in place of each request's last token. Where a graph
        serves it, the output and what is told of it view the graph's buffers: read them before the
        next forward of this model."""
        ...


class EagerForward:
    """Planned on the device's own batch."""

    def __init__(self, runner: ModelRunner, batch: ForwardBatch) -> None:
        self.runner = runner
        self.batch = batch
        runner.attn_backend.init_forward_metadata(batch)

    @property
    def input_ids(self) -> Tensor:
        return self.batch.input_ids

    @property
    def tree(self) -> Tree | None:
        return self.batch.tree

    @property
    def req_pool_indices(self) -> Tensor:
        return self.batch.req_pool_indices

    @property
    def last_rows(self) -> Tensor:
        return self.batch.qo_indptr[1:] - 1

    def run(
        self,
        tokens_T: Tensor | None = None,
        features_TF: Tensor | None = None,
        last_B: Tensor | None = None,
    ) -> LogitsOutput:
        if tokens_T is not None:
            self.batch.input_ids = tokens_T
        if last_B is not None:
            self.batch.input_ids = self.batch.input_ids.index_copy(0, self.last_rows, last_B)
        self.batch.features = features_TF
        return self.runner.forward(self.batch, skip_attn_backend_init=True)


class GraphForward:
    """Kept on the host until it runs: forwards that share a graph take turns with its buffers."""

    def __init__(self, graphs: RaggedGraphRunner, form: Form, batch: ModelWorkerBatch) -> None:
        self.graphs = graphs
        self.form = form
        self.batch = batch
        self._captured: CapturedForward | None = None

    @property
    def input_ids(self) -> Tensor:
        return self.batch.input_ids

    @property
    def tree(self) -> Tree | None:
        return self.batch.tree

    @property
    def req_pool_indices(self) -> Tensor:
        assert self._captured is not None, "run comes first"
        return self._captured.inputs.rows_N[: self.batch.batch_size]

    @property
    def last_rows(self) -> Tensor:
        assert self._captured is not None, "run comes first"
        return self._captured.last_rows(self.batch.batch_size)

    def run(
        self,
        tokens_T: Tensor | None = None,
        features_TF: Tensor | None = None,
        last_B: Tensor | None = None,
    ) -> LogitsOutput:
        tokens = self.batch.input_ids if tokens_T is None else tokens_T
        given = self.form, self.batch, tokens, features_TF, last_B
        output, self._captured = self.graphs.replay(*given)
        return output


class PartsForward:
    """Prompts that are more than a graph holds, as several replays. Nothing of it views the graphs'
    buffers, nor may features: they are read when other graphs of the pool have run. So no graph of
    the target's prefills holds more than one of a drafter's does."""

    tree = None

    def __init__(self, batch: ModelWorkerBatch, parts: list[GraphForward]) -> None:
        """parts: of whole requests, in their order."""
        self.batch = batch
        self.parts = parts
        self._rows: list[Tensor] = []
        self._last_rows: list[Tensor] = []

    @property
    def input_ids(self) -> Tensor:
        return self.batch.input_ids

    @property
    def req_pool_indices(self) -> Tensor:
        return torch.cat(self._rows)

    @property
    def last_rows(self) -> Tensor:
        return torch.cat(self._last_rows)

    def run(
        self,
        tokens_T: Tensor | None = None,
        features_TF: Tensor | None = None,
        last_B: Tensor | None = None,
    ) -> LogitsOutput:
        outputs = []
        self._rows, self._last_rows = [], []
        token = req = 0
        for part in self.parts:
            tokens = slice(token, token + part.batch.num_tokens)
            reqs = slice(req, req + part.batch.batch_size)
            given = _cut(tokens_T, tokens), _cut(features_TF, tokens), _cut(last_B, reqs)
            outputs.append(kept(part.run(*given)))
            self._rows.append(part.req_pool_indices.clone())
            self._last_rows.append(part.last_rows + token)
            token, req = tokens.stop, reqs.stop
        return joined(outputs)


def _cut(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]
