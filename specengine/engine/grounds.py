"""Why a batch does not fly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specengine.core.batch import ScheduleBatch
from specengine.core.spec import HesitantRowDrafter, RowDrafter
from specengine.runner.fallbacks import MEMORY_SPENT

if TYPE_CHECKING:
    from specengine.engine.graph_round import GraphRound


TRACED = "rounds are traced"


def if_hesitant(drafter: RowDrafter) -> HesitantRowDrafter | None:
    """To be asked once: it takes 20 us, which each launch would wait for."""
    return drafter if isinstance(drafter, HesitantRowDrafter) else None


def find_ground(flying: GraphRound, batch: ScheduleBatch) -> str | None:
    """What keeps a batch from being of the kind that the graphs were made for; None: nothing."""
    size, sampling = batch.batch_size, batch.sampling
    if size > flying.batch_sizes[-1]:
        return "batch larger than any captured"
    if not flying.padding and size not in flying.batch_sizes:
        return "batch size not captured, padding off"
    if not flying.choices.fits(batch.reqs):
        return "more requests edit their logits than there are tables for"
    if not sampling.all_greedy and not flying.samples:
        return "sampling, with a verifier that weighs drafts"
    if any(req.grammar is not None for req in batch.reqs) and not flying.masks_fly:
        return "grammar"
    drafter = flying.hesitant
    if drafter is not None and not all(map(drafter.is_ready, batch.reqs)):
        return "a request that the drafter has seen too little of"
    if not all(flying.has_slots(req, flying.num_slots) for req in batch.reqs):
        return "memory nearly full"
    return None if flying.has_graphs(batch.reqs) else MEMORY_SPENT
