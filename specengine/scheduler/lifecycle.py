"""How requests leave the KV memory, and who is notified."""

from __future__ import annotations

from time import monotonic

from specengine.core.request import FinishReason, Req, ReqState
from specengine.scheduler.ledger import KVLedger
from specengine.scheduler.queues import RequestQueues


class RequestLifecycle:
    """Finish, abort and retraction: one release of the KV, then what differs."""

    def __init__(self, queues: RequestQueues, ledger: KVLedger) -> None:
        self.queues = queues
        self.ledger = ledger
        self.num_retractions = 0
        self.num_aborts = 0  # by their client, or given up
        self._changed: dict[Req, None] = {}
        self._released: list[Req] = []

    def finish(self, req: Req, reason: FinishReason) -> None:
        self._release(req)
        self.queues.forget(req)
        req.state = ReqState.FINISHED
        req.finish_reason = reason
        self.num_aborts += reason.kind in ("abort", "error")
        req.finish_time = monotonic()
        self.note_change(req)

    def retract(self, req: Req) -> None:
        """Back to its place in the queue. Its output stays; its KV is found in the cache
        or written again."""
        self._release(req)
        req.state = ReqState.WAITING
        req.num_retractions += 1
        self.num_retractions += 1
        if not req.output_ids:
            req.prompt_logprobs.clear()
        self.queues.put_back(req)

    def note_change(self, req: Req) -> None:
        """The request has something to show: new tokens, or its end."""
        self._changed[req] = None

    def take_changed(self) -> list[Req]:
        changed, self._changed = list(self._changed), {}
        return changed

    def take_released(self) -> list[Req]:
        released, self._released = self._released, []
        return released

    def _release(self, req: Req) -> None:
        self.queues.remove(req)
        self.ledger.release(req)
        self._released.append(req)
