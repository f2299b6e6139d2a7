"""Which experts each row chooses, and with which weights."""

from __future__ import annotations

from torch import Tensor

from specengine.kernels.dispatch import Backend, use_triton
from specengine.kernels.experts import route_ref
from specengine.kernels.experts.types import Chosen, Router, Routing

MAX_EXPERTS = 1024  # of the Triton form, which holds a row's scores in one program


def route(x: Tensor, router: Router, routing: Routing, *, backend: Backend = "auto") -> Chosen:
    """For each row x::

        scores = softmax or sigmoid(router.weight @ x + router.bias)         # in float32
        ranks = scores + router.correction
        if num_groups > 1:        # a group is E / num_groups experts that lie together
            value of a group = sum of its group_best (1 or 2) largest ranks
            ranks outside of the num_chosen_groups best groups = -inf
        ids = the num_chosen largest ranks, the largest first, of equal ones the first
        weights = scores[ids]
        if normalised: weights /= sum(weights)
        weights *= scaling

    x: [T, H]; the router's weight [E, H] of x's dtype. Any device; Triton on CUDA, where a row's
    result has the same bits whatever other rows there are, at every T.
    """
    if use_triton(backend, x) and len(router.weight) <= MAX_EXPERTS:
        from specengine.kernels.experts import route_triton

        found: Chosen = route_triton.route(x, router, routing)
        return found
    return route_ref.route(x, router, routing)
