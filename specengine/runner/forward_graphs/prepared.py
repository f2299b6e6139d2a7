"""Forwards that are prepared before their tokens are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from specengine.core.batch import ForwardBatch, ModelWorkerBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.last_rows import keep_last
from specengine.core.tree import Tree
from specengine.runner.forward_graphs.keys import ForwardKey
from specengine.runner.forward_graphs.outputs import copy_of, joined
from specengine.runner.forward_graphs.ragged import ForwardBuffers, RaggedGraphs


class PreparedForward(Protocol):
    """A forward without its tokens, and perhaps without its tree. After it has run, its requests'
    rows of the page table, and the rows of their last tokens, lie on the device."""

    @property
    def input_ids(self) -> Tensor:
        """int64 [T] as given, on the host or the device."""
        ...

    @property
    def tree(self) -> Tree | None: ...

    @property
    def req_pool_indices(self) -> Tensor: ...

    @property
    def last_rows(self) -> Tensor:
        """int64 [B], the row of each request's last token."""
        ...

    def run(
        self,
        tokens_T: Tensor | None = None,
        features_TF: Tensor | None = None,
        last_B: Tensor | None = None,
        narrows: bool = False,
    ) -> LogitsOutput:
        """tokens_T: None takes those of the batch. features_TF: what a drafter's model takes in
        beside them. last_B: on the device, in place of each request's last token. narrows: the
        hidden states may be those of last_rows alone. The output and the properties may view a
        graph's buffers: read them before the model's next forward."""
        ...


class EagerForward:
    """Runs on the device's own batch, which was planned before."""

    def __init__(
        self, batch: ForwardBatch, forward: Callable[[ForwardBatch, bool], LogitsOutput]
    ) -> None:
        """forward: ModelRunner.forward."""
        self.batch = batch
        self.forward = forward
        self.tree = batch.tree
        self.req_pool_indices = batch.req_pool_indices

    @property
    def input_ids(self) -> Tensor:
        return self.batch.input_ids

    @property
    def last_rows(self) -> Tensor:
        return self.batch.qo_indptr[1:] - 1

    def run(
        self,
        tokens_T: Tensor | None = None,
        features_TF: Tensor | None = None,
        last_B: Tensor | None = None,
        narrows: bool = False,
    ) -> LogitsOutput:
        if tokens_T is not None:
            self.batch.input_ids = tokens_T
        if last_B is not None:
            self.batch.input_ids = self.batch.input_ids.index_copy(0, self.last_rows, last_B)
        self.batch.features = features_TF
        if narrows and self.batch.num_tokens > self.batch.batch_size:
            keep_last(self.batch)
        return self.forward(self.batch, True)


class GraphForward:
    """Keeps its batch on the host until it runs: forwards that share a graph share its buffers."""

    def __init__(self, graphs: RaggedGraphs, key: ForwardKey, batch: ModelWorkerBatch) -> None:
        self.graphs = graphs
        self.key = key
        self.batch = batch
        self.input_ids = batch.input_ids
        self.tree = batch.tree
        self._buffers: ForwardBuffers | None = None  # set by run

    @property
    def req_pool_indices(self) -> Tensor:
        assert self._buffers is not None, "run comes first"
        return self._buffers.inputs.rows_N[: self.batch.batch_size]

    @property
    def last_rows(self) -> Tensor:
        assert self._buffers is not None, "run comes first"
        return self._buffers.last_rows(self.batch.batch_size)

    def run(
        self,
        tokens_T: Tensor | None = None,
        features_TF: Tensor | None = None,
        last_B: Tensor | None = None,
        narrows: bool = False,
    ) -> LogitsOutput:
        tokens = self.batch.input_ids if tokens_T is None else tokens_T
        output, self._buffers = self.graphs.replay(
            self.key, self.batch, tokens, features_TF, last_B
        )
        return output


class PartsForward:
    """Prompts that no graph holds at once, as several replays. Its outputs are copies. features_TF
    must not view a graph's buffers, since they are read after other graphs of the pool have run: so
    no graph of the target's prefills holds more of such prompts than one of a drafter's does."""

    tree = None

    def __init__(self, batch: ModelWorkerBatch, parts: list[GraphForward]) -> None:
        """parts: of whole requests, in their order."""
        self.batch = batch
        self.input_ids = batch.input_ids
        self.parts = parts
        self._rows: list[Tensor] = []
        self._last_rows: list[Tensor] = []

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
        narrows: bool = False,
    ) -> LogitsOutput:
        outputs = []
        self._rows, self._last_rows = [], []
        token = req = 0
        for part in self.parts:
            tokens = slice(token, token + part.batch.num_tokens)
            reqs = slice(req, req + part.batch.batch_size)
            given = _cut(tokens_T, tokens), _cut(features_TF, tokens), _cut(last_B, reqs)
            outputs.append(copy_of(part.run(*given)))
            self._rows.append(part.req_pool_indices.clone())
            self._last_rows.append(part.last_rows + token)
            token, req = tokens.stop, reqs.stop
        return joined(outputs)


def _cut(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]
