"""Slots that requests have before they need them."""

from __future__ import annotations

from specengine.core.request import Req
from specengine.scheduler.ledger import KVLedger
from specengine.scheduler.policy import SchedulePolicy

# Tokens reserved past a round while memory is plentiful, so that most rounds reserve nothing.
AHEAD = 64


def slots_ahead(ledger: KVLedger, requests: int, nodes: int) -> int:
    """Of each of so many requests, past the `nodes` of a round. What the cache would give up counts
    as free: it fills all memory in time."""
    return AHEAD if ledger.obtainable > 2 * requests * (AHEAD + nodes) else 0


def length_ahead(policy: SchedulePolicy, req: Req, length: int, nodes: int, ahead: int) -> int:
    """Tokens to have slots for, of which `length` stand: a round's and those ahead, as far as the
    request can still grow."""
    growth = nodes + min(ahead, policy.remaining_tokens(req))
    return min(length + growth, policy.context_len)
