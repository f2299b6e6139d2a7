"""An engine without a model: the next token is a pure function of the sequence so far, and every
KV slot remembers the prefix it was written for, so that a forward can tell a wrong slot."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specengine.core.batch import ScheduleBatch
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.spec import PrefillResult, VerifyResult
from specengine.memory.allocator import TokenToKVPoolAllocator
from specengine.memory.radix_cache import RadixCache
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.scheduler.ledger import KVLedger
from specengine.scheduler.policy import SchedulePolicy
from specengine.scheduler.scheduler import Scheduler

VOCAB = 29
CPU = torch.device("cpu")


class LetterDecoder:
    """Token 0 is "a", 1 is "b", and so on."""

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def next_token(tokens: Sequence[int]) -> int:
    return hash((*tokens[-4:], len(tokens))) % VOCAB


def prefix_hash(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) % (2**61 - 1)


def expected_output(req: Req, context_len: int) -> list[int]:
    """What the request would say alone, one token at a time."""
    output: list[int] = []
    while not _ends(req, output, context_len):
        output.append(next_token(req.prompt_ids + output))
    return output


def _ends(req: Req, output: list[int], context_len: int) -> bool:
    sampling = req.sampling
    if len(output) > sampling.min_tokens:
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids |= req.eos_ids
        text = LetterDecoder().add(output)
        if output[-1] in stop_ids or any(text.endswith(stop) for stop in sampling.stop):
            return True
    is_full = len(req.prompt_ids) + len(output) >= context_len
    return is_full or len(output) == sampling.max_tokens


@dataclass(frozen=True)
class Setup:
    num_slots: int = 256
    page_size: int = 1
    context_len: int = 96
    rows: int = 8
    chunk: int = 16
    max_nodes: int = 1
    mixed: bool = False
    disable_cache: bool = False

    def scheduler(self) -> Scheduler:
        ledger = KVLedger(
            ReqToTokenPool(self.rows, self.context_len, CPU),
            TokenToKVPoolAllocator(self.num_slots + self.page_size, self.page_size),
            RadixCache(self.page_size, self.disable_cache),
        )
        policy = SchedulePolicy(
            context_len=self.context_len,
            max_running_requests=self.rows,
            chunked_prefill_size=self.chunk,
            max_nodes=self.max_nodes,
            enable_mixed_chunk=self.mixed,
        )
        return Scheduler(policy, ledger, VOCAB, CPU, lambda _: LetterDecoder())


@dataclass
class FakeEngine:
    setup: Setup
    seed: int = 0
    steps: int = 0
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = self.setup.scheduler()
        self.random = random.Random(self.seed)
        self.kv = [0] * (self.setup.num_slots + self.setup.page_size)

    def add(
        self, rid: str, prompt: list[int], sampling: SamplingParams, eos: int = 0, owner: str = ""
    ) -> Req:
        req = Req(rid, prompt, sampling, frozenset({eos}), owner=owner)
        self.scheduler.add(req)
        return req

    def run(self, limit: int = 5000) -> None:
        while self.scheduler.has_work:
            self.step()
            limit -= 1
            assert limit, "the scheduler goes round in circles"

    def step(self) -> ScheduleBatch | None:
        self.steps += 1
        batch = self.scheduler.schedule()
        self.scheduler.check_invariant()
        queues = self.scheduler.queues
        assert queues.served == Counter(req.owner for req in queues.live)
        if batch is not None:
            if batch.forward_mode.is_prefill():
                self.scheduler.commit_prefill(batch, self.prefill(batch))
            else:
                self.scheduler.commit_round(batch.reqs, self.round(batch))
        self.scheduler.check_invariant()
        return batch

    def prefill(self, batch: ScheduleBatch) -> PrefillResult:
        batch.get_model_worker_batch()
        flat = iter(np.asarray(batch.input_ids).tolist())
        tokens: list[int | None] = []
        for i, req in enumerate(batch.reqs):
            new = [next(flat) for _ in range(batch.extend_lens[i])]
            known = req.token_ids[: batch.prefix_lens[i] + len(new)]
            assert known[batch.prefix_lens[i] :] == new
            self.write_kv(req, batch.prefix_lens[i], new)
            tokens.append(next_token(known) if batch.samples[i] else None)
        assert next(flat, None) is None
        return PrefillResult(tokens, [None] * len(tokens), [[] for _ in tokens])

    def round(self, batch: ScheduleBatch) -> VerifyResult:
        tokens, accepted, drafted = [], [], []
        for i, req in enumerate(batch.reqs):
            limit = self.scheduler.round_limit(req)
            assert 1 <= limit <= self.setup.max_nodes
            nodes = self.random.randint(1, limit)
            run = [batch.input_ids[i]]
            known = req.token_ids
            for _ in range(nodes):
                run.append(next_token(known))
                known.append(run[-1])
            good = self.random.randint(0, nodes - 1)
            rejected = [VOCAB] * (nodes - 1 - good)
            self.write_kv(req, batch.prefix_lens[i], run[: good + 1] + rejected)
            tokens.append(run[1 : good + 2])
            accepted.append(good)
            drafted.append(nodes - 1)
        self.accepted += accepted
        return VerifyResult(tokens, accepted, drafted, kv_keep=None)

    def write_kv(self, req: Req, start: int, tokens: list[int]) -> None:
        """Checks that the slots before `start` hold the KV of this very prefix, then writes."""
        assert req.req_pool_idx is not None
        end = start + len(tokens)
        row = self.scheduler.ledger.rows.req_to_token[req.req_pool_idx, :end].tolist()
        assert 0 not in row, "slot 0 belongs to no request"
        assert len(set(row)) == end
        value = 0
        for slot, token in zip(row[:start], req.token_ids, strict=False):
            value = prefix_hash(value, token)
            assert self.kv[slot] == value, f"{req.rid}: slot {slot} holds other KV"
        for slot, token in zip(row[start:], tokens, strict=True):
            value = prefix_hash(value, token)
            self.kv[slot] = value
