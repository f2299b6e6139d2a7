"""Records rounds into a trace."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.request import Req
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.draft.trace.format import RECORD, TOKEN, Array, RoundColumns, node_dtype
from specengine.draft.trace.writer import TraceWriter
from specengine.engine.tracing.weights import NodeWeights, weigh


class TraceRecorder:
    """A RoundRecorder. Requests under a grammar are left out: the target's distribution is masked
    for them, and their drafts are cut.

    node_limit(req): the most nodes, root included, that a request can use in this round.
    """

    def __init__(
        self, writer: TraceWriter, node_limit: Callable[[Req], int], is_sampled: bool
    ) -> None:
        self._writer = writer
        self._node_limit = node_limit
        self._node_dtype = node_dtype(is_sampled)
        self._requests = _Requests(writer)
        # At the end of the process at the latest.
        self.close = weakref.finalize(self, self._requests.close)

    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None:
        if self._writer.is_full:
            return
        self._requests.end_finished()
        rows = [i for i, req in enumerate(batch.reqs) if req.grammar is None]
        if not rows:
            return
        weights = weigh(proposal, output, batch.sampling)
        emitted = list(chain.from_iterable(result.tokens[i] for i in rows))
        self._writer.add_round(
            RoundColumns(
                records=self._records(rows, batch, proposal, result),
                nodes=self._nodes(rows, proposal, weights),
                tokens=np.array(emitted, TOKEN),
            )
        )

    def _records(
        self, rows: list[int], batch: ScheduleBatch, proposal: DraftProposal, result: VerifyResult
    ) -> Array:
        records = np.zeros(len(rows), RECORD)
        reqs = [batch.reqs[i] for i in rows]
        records["request"] = [self._requests.number(req) for req in reqs]
        records["position"] = [len(req.output_ids) for req in reqs]
        records["limit"] = [self._node_limit(req) for req in reqs]
        records["num_nodes"] = [proposal.num_nodes[i] for i in rows]
        records["num_tokens"] = [len(result.tokens[i]) for i in rows]
        records["accepted"] = [result.num_accepted[i] for i in rows]
        return records

    def _nodes(self, rows: list[int], proposal: DraftProposal, weights: NodeWeights) -> Array:
        counts = np.zeros(len(proposal.num_nodes), np.int64)
        counts[rows] = np.array(proposal.num_nodes)[rows]
        place = np.arange(proposal.tokens.shape[1])
        drafted_BN = (place > 0) & (place < counts[:, None])
        nodes = np.zeros(int(drafted_BN.sum()), self._node_dtype)
        nodes["token"] = proposal.tokens.cpu().numpy()[drafted_BN]
        nodes["parent"] = proposal.parents.cpu().numpy()[drafted_BN]
        for name in self._node_dtype.names[2:]:
            nodes[name] = getattr(weights, name).numpy()[drafted_BN]
        return nodes


class WrittenElsewhere:
    """A RoundRecorder of a rank that is not the first, which writes the trace."""

    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None:
        """Nothing. What the first rank records has no collective."""


class _Requests:
    """The requests that rounds were recorded of, by number."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._open: dict[Req, int] = {}
        self._count = 0

    def number(self, req: Req) -> int:
        if req not in self._open:
            self._open[req] = self._count
            self._count += 1
            self._writer.add_request(_about(req))
        return self._open[req]

    def end_finished(self) -> None:
        for req in [req for req in self._open if req.is_finished]:
            self._writer.add_end(self._open.pop(req), len(req.output_ids))

    def close(self) -> None:
        self.end_finished()
        self._writer.close()


def _about(req: Req) -> dict[str, Any]:
    sampling = req.sampling
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
    about = {name: getattr(sampling, name) for name in names}
    return about | {
        "rid": req.rid,
        "num_prompt_tokens": len(req.prompt_ids),
        "is_greedy": sampling.is_greedy,
        "seed": req.seed,
    }
