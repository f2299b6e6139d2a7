"""One round of speculation as the host runs it: the algorithm, and the reference of the tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specengine.core.batch import ModelWorkerBatch, ScheduleBatch
from specengine.core.columns import sent_columns
from specengine.core.drafter import Drafter
from specengine.core.interfaces import KVPool, ReqToTokenTable, StatePool
from specengine.core.spec import RoundRecorder, Verifier, VerifyResult
from specengine.engine.draft_depth import draft_within_limits
from specengine.engine.draft_nodes import path_ranks
from specengine.engine.grammar.drafts import constrain
from specengine.kernels.delta.types import StatePaths
from specengine.kernels.kv.types import KVPaths
from specengine.runner.fallbacks import HOOKED, OBSERVED
from specengine.runner.worker import TpModelWorker

if TYPE_CHECKING:
    from specengine.engine.plan_ahead import PlanAhead, PlannedVerify


class HostRound:
    """Draft, verify, accept, keep, observe (Leviathan et al. 2023, algorithm 1).

    A draft begins with the root: the request's last token, which is emitted already, and whose KV
    this verification writes. What is emitted are the accepted drafts below it and the bonus token,
    which the target chooses after the last of them: the root of the next round.

    Decoding without speculation is the same round with a drafter that proposes nothing.
    """

    def __init__(self, worker: TpModelWorker, drafter: Drafter, verifier: Verifier) -> None:
        self.worker = worker
        self.drafter = drafter
        self.verifier = verifier
        # Set by engine.build.build_engine, under --enable-plan-stream.
        self.plan_ahead: PlanAhead | None = None
        self.recorders: list[RoundRecorder] = []
        self.drafting = 0.0  # seconds that drafting took in the last round
        self.from_lookup: list[bool] | None = None  # of the last round, as in DraftProposal

    @property
    def why_watched(self) -> str | None:
        """Why rounds have to run here: something looks at them that sees no others."""
        if self.recorders:
            return OBSERVED
        return HOOKED if self.worker.runner.hooks.is_used else None

    def run(
        self,
        batch: ScheduleBatch,
        most_levels: int | None = None,
        most_nodes: int | None = None,
    ) -> VerifyResult:
        """most_levels: how deep drafts may go. most_nodes: how many nodes trees may have whose best
        nodes are known, root included. None leaves either to the drafter."""
        planned = None if self.plan_ahead is None else self.plan_ahead.begin(batch, most_levels)
        limits, start = (most_levels, most_nodes), perf_counter()
        with _dropped_on_failure(planned):
            drafted = constrain(batch, draft_within_limits(self.drafter, batch, *limits))
            self.drafting = perf_counter() - start
            proposal = drafted.proposal
            self.from_lookup = proposal.from_lookup
            verify_batch = self.verifier.prepare(batch, proposal)
        output = None if planned is None else planned.run(verify_batch)
        if output is None:
            output = self.worker.forward_batch_generation(verify_batch)
        result = self.verifier.accept(output, drafted.masked(batch), proposal)
        result.path_ranks = path_ranks(proposal, result)
        pools = self.worker.runner.pools
        if pools.states is not None and verify_batch.forward_mode.is_target_verify():
            advance_states(verify_batch, result, pools.states)
        if result.kv_keep is not None:
            compact_kv(batch, result.kv_keep, pools.req_to_token_pool, pools.token_to_kv_pool)
        for recorder in self.recorders:
            recorder.record(batch, proposal, output, result)
        self.drafter.observe(batch, output, result)
        return result


@contextmanager
def _dropped_on_failure(planned: PlannedVerify | None) -> Iterator[None]:
    """A plan that nothing will run."""
    try:
        yield
    except BaseException:
        if planned is not None:
            planned.ahead.drop()
        raise


def advance_states(batch: ModelWorkerBatch, result: VerifyResult, states: StatePool) -> None:
    """Move recurrent state on to the end of the accepted path of each request. batch: the
    verification."""
    starts = [0, *accumulate(batch.extend_lens[:-1])]
    columns = [batch.req_pool_indices, starts, result.num_accepted]
    nodes_BW: Tensor | None = None
    if result.kv_keep is None:
        rows_B, starts_B, accepted_B = sent_columns(columns, states.device)
    else:
        sent = _sent_with_paths(columns, result.kv_keep, states.device)
        rows_B, starts_B, accepted_B, nodes_BW = sent
    width = max(batch.extend_lens) if nodes_BW is None else nodes_BW.shape[1]
    states.keep_paths(StatePaths(rows_B, starts_B, accepted_B, nodes_BW, width))


def compact_kv(
    batch: ScheduleBatch, kv_keep: list[list[int]], table: ReqToTokenTable, kv: KVPool
) -> None:
    """Move the KV of the accepted path of each tree to where a chain would have written it.

    Node i of a request lies at position prefix + i; the path's k-th node belongs at prefix + k.
    """
    if all(path[-1] == len(path) - 1 for path in kv_keep):
        return
    accepted = [len(path) - 1 for path in kv_keep]
    columns = [[req.row for req in batch.reqs], batch.prefix_lens, accepted]
    device = table.req_to_token.device
    rows_B, lens_B, accepted_B, nodes_BW = _sent_with_paths(columns, kv_keep, device)
    kv.keep_paths(KVPaths(table.req_to_token, rows_B, lens_B, nodes_BW, accepted_B))


def _sent_with_paths(
    columns: Sequence[Sequence[int]], paths: list[list[int]], device: torch.device
) -> list[Tensor]:
    """int64 on the device: the columns, then the paths as [B, W], padded with 0."""
    width = max(map(len, paths))
    nodes = [node for path in paths for node in (*path, *[0] * (width - len(path)))]
    *sent, nodes_T = sent_columns([*columns, nodes], device)
    return [*sent, nodes_T.view(len(paths), width)]
