"""The KV that rounds leave to a smaller model that drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from specengine import LLM, SamplingParams
from specengine.core.request import Req
from specengine.draft.standalone.worker import StandaloneWorker
from specengine.engine.round.sampling import rows_of


def kv_of(drafter: StandaloneWorker, req: Req, size: int) -> Iterator[Tensor]:
    """The draft's, of a request's first tokens."""
    pools = drafter.runner.pools
    kv = pools.token_to_kv_pool
    (row,) = rows_of([req])
    slots = pools.req_to_token_pool.req_to_token[row, :size].long()
    for layer in range(2):
        yield from (one[slots] for one in kv.get_kv_buffer(layer))


def assert_same_kv(drafter: StandaloneWorker, reqs: list[Req], host: LLM) -> None:
    """As prompts of the same texts leave in `host`, but of the last two tokens. `host` has no
    requests before and after."""
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)
    for n, req in enumerate(reqs):
        text = req.token_ids
        assert req.kv_len == len(text) - 1
        host.engine.add_request(f"{len(text)} {n}", text, params)
    host.engine.step()
    others = [*host.engine.choices]
    for req, other in zip(reqs, others, strict=True):
        size = req.kv_len - 1
        its = kv_of(cast(StandaloneWorker, host.engine.drafter), other, size)
        for one, expected in zip(kv_of(drafter, req, size), its, strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-4)
    for other in others:
        host.engine.abort(other.rid.split("#")[0])
    host.engine.step()
