"""Forwards that are prepared before their tokens are known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from specengine.core.batch import ForwardBatch, ModelWorkerBatch, Tree
from specengine.core.interfaces import LogitsOutput
from specengine.runner.ragged_forms import Form
from specengine.runner.ragged_graphs import CapturedForward, RaggedGraphRunner

if TYPE_CHECKING:
    from specengine.runner.model_runner import ModelRunner


class PreparedForward(Protocol):
    """A forward that lacks its tokens, and perhaps what its tree looks like. Once it has run, its
    requests' rows of the page table, and where their tokens start, lie on the device."""

    @property
    def input_ids(self) -> Tensor:
        """int64 [T], as they were given, on the host or the device."""
        ...

    @property
    def tree(self) -> Tree | None: ...

    @property
    def req_pool_indices(self) -> Tensor: ...

    @property
    def qo_indptr(self) -> Tensor: ...

    def run(
        self, tokens_T: Tensor | None = None, features_TF: Tensor | None = None
    ) -> LogitsOutput:
        """tokens_T: None takes those of the batch; features_TF: what a drafter's model takes in
        beside them. Where a graph serves it, the output views the graph's buffers: read it before
        the next forward of this model."""
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
    def qo_indptr(self) -> Tensor:
        return self.batch.qo_indptr

    def run(
        self, tokens_T: Tensor | None = None, features_TF: Tensor | None = None
    ) -> LogitsOutput:
        if tokens_T is not None:
            self.batch.input_ids = tokens_T
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
    def qo_indptr(self) -> Tensor:
        assert self._captured is not None, "run comes first"
        return self._captured.inputs.qo_indptr[: self.batch.batch_size + 1]

    def run(
        self, tokens_T: Tensor | None = None, features_TF: Tensor | None = None
    ) -> LogitsOutput:
        tokens = self.batch.input_ids if tokens_T is None else tokens_T
        output, self._captured = self.graphs.replay(self.form, self.batch, tokens, features_TF)
        return output
