"""Which graph serves a forward of one model.

A batch on the host is offered to the graphs of whole forwards: decode, prefill, ragged. A batch on
the device, planned, that none of them served is offered to the pieces (runner/piecewise). What is
left runs eagerly. Each kind that refuses a batch counts a reason of runner/fallbacks.py.
"""

from __future__ import annotations

from typing import Protocol

from specengine.core.batch import AttentionBackend, ForwardMode, ModelWorkerBatch
from specengine.core.interfaces import LogitsOutput
from specengine.runner.fallbacks import KEEPS_STATE, PADDING_OFF, PLANS_ON_HOST, NoGraphs
from specengine.runner.forward_graphs.decode import DecodeGraphs
from specengine.runner.forward_graphs.prefill import PrefillGraphs
from specengine.runner.forward_graphs.ragged import RaggedGraphs


class WholeGraphs(Protocol):
    """ModelRunner's. None: the configuration asks for none of the kind."""

    decode_graphs: DecodeGraphs | None
    prefill_graphs: PrefillGraphs | NoGraphs | None
    ragged_graphs: RaggedGraphs | None


def whole_graph(graphs: WholeGraphs, batch: ModelWorkerBatch) -> LogitsOutput | None:
    """The forward of a captured graph; None where none serves the batch."""
    if graphs.decode_graphs is not None and graphs.decode_graphs.can_run(batch):
        return graphs.decode_graphs.replay(batch)
    if isinstance(graphs.prefill_graphs, PrefillGraphs):
        output = graphs.prefill_graphs.run(batch)
        if output is not None:
            return output
    elif graphs.prefill_graphs is not None and batch.forward_mode is ForwardMode.EXTEND:
        graphs.prefill_graphs.count()
    if graphs.ragged_graphs is not None:
        key = graphs.ragged_graphs.key_of(batch)
        if key is not None:
            return graphs.ragged_graphs.replay(key, batch, batch.input_ids)[0]
    return None


def why_no_prefill_graphs(
    backend: AttentionBackend, keeps_state: bool, padding: bool
) -> str | None:
    """A reason, for all batches; None where whole prefills may be graphs. keeps_state: the model
    has recurrent state."""
    if not padding:
        return PADDING_OFF
    if backend.for_mode(ForwardMode.EXTEND).limits.plans_on_host:
        return PLANS_ON_HOST
    return KEEPS_STATE if keeps_state else None
