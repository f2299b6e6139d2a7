"""One round of speculation."""

from __future__ import annotations

import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import KVPool, ReqToTokenTable
from specengine.core.spec import Drafter, RoundRecorder, Verifier, VerifyResult
from specengine.engine.draft_depth import draft_within_limits
from specengine.engine.grammar.drafts import constrain
from specengine.runner.worker import TpModelWorker


class SpeculativeRound:
    """Draft, verify, accept, keep, observe (Leviathan et al. 2023, algorithm 1).

    Decoding without speculation is the same round with a drafter that proposes nothing.
    """

    def __init__(self, worker: TpModelWorker, drafter: Drafter, verifier: Verifier) -> None:
        self.worker = worker
        self.drafter = drafter
        self.verifier = verifier
        self.recorders: list[RoundRecorder] = []

    def run(self, batch: ScheduleBatch, most_levels: int | None = None) -> VerifyResult:
        """most_levels: how deep drafts may go; None leaves it to the drafter."""
        drafted = constrain(batch, draft_within_limits(self.drafter, batch, most_levels))
        proposal = drafted.proposal
        verify_batch = self.verifier.prepare(batch, proposal)
        output = self.worker.forward_batch_generation(verify_batch)
        result = self.verifier.accept(output, drafted.masked(batch), proposal)
        if result.kv_keep is not None:
            pools = self.worker.get_memory_pool()
            compact_kv(batch, result.kv_keep, pools.req_to_token_pool, pools.token_to_kv_pool)
        for recorder in self.recorders:
            recorder.record(batch, proposal, output, result)
        self.drafter.observe(batch, output, result)
        return result


def compact_kv(
    batch: ScheduleBatch, kv_keep: list[list[int]], table: ReqToTokenTable, kv: KVPool
) -> None:
    """Move the KV of the accepted path of each tree to where a chain would have written it.

    Node i of a request lies at position prefix + i; the path's k-th node belongs at prefix + k.
    """
    moves = [
        (req.req_pool_idx, prefix + node, prefix + place)
        for req, prefix, path in zip(batch.reqs, batch.prefix_lens, kv_keep, strict=True)
        for place, node in enumerate(path)
        if node != place
    ]
    if not moves:
        return
    device = table.req_to_token.device
    rows, src, dst = torch.tensor(moves, dtype=torch.int64).to(device, non_blocking=True).unbind(1)
    slots = table.req_to_token
    kv.move(slots[rows, src].to(torch.int64), slots[rows, dst].to(torch.int64))
