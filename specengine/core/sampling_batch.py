"""The sampling parameters of a batch on the device, in groups that exist only where asked for.

Rows of the [P + 1, V] tables belong to the P requests that edit their logits; row 0 belongs to all
others and is neutral. `slots` maps a request to its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from specengine.core.choice_words import choice_words, top_k_of
from specengine.core.columns import Columns
from specengine.core.grammar import TokenMask
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.kernels.sample.types import (
    MIN_P,
    NUM_COLUMNS,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    ChoiceTable,
)


@dataclass
class RandomParams:
    """For batches in which some request samples. Greedy requests among them carry temperature 1
    and no filter; their tokens are taken by argmax."""

    greedy: Tensor  # bool [B]
    temperature: Tensor  # float32 [B], above 0
    top_k: Tensor  # int64 [B], V where off
    top_p: Tensor  # float64 [B], 1 where off
    min_p: Tensor  # float32 [B], 0 where off
    seeds: Tensor  # int64 [B]
    table: ChoiceTable  # the same, a row a request
    any_greedy: bool
    max_top_k: int  # largest top-k that cuts anything; 0 for none
    any_top_p: bool
    any_open_top_p: bool  # some top_p request has no top-k that bounds its candidates
    any_min_p: bool


@dataclass
class Penalties:
    """Penalties, and what they count. `counts` follows the committed output tokens."""

    frequency: Tensor  # float32 [B]
    presence: Tensor  # float32 [B]
    repetition: Tensor  # float32 [B], 1 where off
    prompt_seen: Tensor  # bool [P + 1, V]
    counts: Tensor  # float32 [P + 1, V], whole numbers


@dataclass
class MinTokens:
    """Tokens that would end a request, forbidden while its output is too short."""

    min_tokens: Tensor  # int64 [B]
    forbidden: Tensor  # bool [P + 1, V]


@dataclass
class LogitEdits:
    """What changes logits before the temperature does."""

    slots: Tensor  # int64 [B], 0 where a request asks for nothing
    bias: Tensor | None  # float32 [P + 1, V]
    penalties: Penalties | None
    min_tokens: MinTokens | None


@dataclass
class SamplingBatch:
    """How each request of a batch wants its tokens chosen. Build it with `from_reqs` whenever the
    requests change, and `refresh` it between rounds of the same requests."""

    vocab_size: int
    device: torch.device
    logprobs: list[int | None]  # [B], alternatives asked for; None is off
    output_lens: list[int]  # [B], output tokens counted so far
    output_pos: Tensor | None  # int64 [B], index of the next output token; None: it is not read
    random: RandomParams | None  # None: every request is greedy
    edits: LogitEdits | None
    mask: TokenMask | None = None  # one slot a row; set where the engine has tokens chosen

    @property
    def batch_size(self) -> int:
        return len(self.logprobs)

    @property
    def all_greedy(self) -> bool:
        return self.random is None

    @property
    def is_plain(self) -> bool:
        """Every token is the argmax of the raw logits."""
        return self.random is None and self.edits is None and self.mask is None

    @property
    def max_logprobs(self) -> int | None:
        return max((k for k in self.logprobs if k is not None), default=None)

    @classmethod
    def from_reqs(cls, reqs: list[Req], vocab_size: int, device: torch.device) -> SamplingBatch:
        params = [req.sampling for req in reqs]
        output_lens = [len(req.output_ids) for req in reqs]
        random = not all(p.is_greedy for p in params)
        edits = _EditPlan.of(reqs)
        columns = Columns()
        if random or edits.follow_output:
            columns.ints("output_pos", output_lens)
        if random:
            columns.ints("choices", choice_words(reqs, vocab_size).ravel())
        edits.add_columns(columns, vocab_size)
        sent = columns.send(device)
        return cls(
            vocab_size=vocab_size,
            device=device,
            logprobs=[p.logprobs for p in params],
            output_lens=output_lens,
            output_pos=sent.get("output_pos"),
            random=_random_params(sent["choices"], params, vocab_size) if random else None,
            edits=edits.build(sent, vocab_size, device),
        )

    def refresh(self, reqs: list[Req]) -> None:
        """Catch up with the tokens committed since; `reqs` are those it was built from, in order.
        Costs nothing where no parameter looks at the output."""
        if self.output_pos is None:
            return
        columns = Columns()
        output_lens = [len(req.output_ids) for req in reqs]
        columns.ints("output_pos", output_lens)
        penalised = [i for i, req in enumerate(reqs) if req.sampling.has_penalties]
        if penalised:
            new = [reqs[i].output_ids[self.output_lens[i] :] for i in penalised]
            columns.ragged("new", penalised, new)
        sent = columns.send(self.device)
        self.output_pos, self.output_lens = sent["output_pos"], output_lens
        if self.edits is not None and self.edits.penalties is not None:
            slots = self.edits.slots[sent["new_rows"]]
            _count(self.edits.penalties.counts, slots, sent["new_tokens"])


def _random_params(words: Tensor, params: list[SamplingParams], vocab_size: int) -> RandomParams:
    sampled = [p for p in params if not p.is_greedy]
    top_ks = [top_k_of(p, vocab_size) for p in sampled]
    table = ChoiceTable(words.view(-1, NUM_COLUMNS))
    greedy = table.column(TEMPERATURE) == 0.0
    return RandomParams(
        greedy=greedy,
        temperature=table.column(TEMPERATURE).float().masked_fill(greedy, 1.0),
        top_k=table.column(TOP_K).contiguous(),
        top_p=table.column(TOP_P).contiguous(),
        min_p=table.column(MIN_P).float(),
        seeds=table.column(SEED).contiguous(),
        table=table,
        any_greedy=len(sampled) < len(params),
        max_top_k=max((k for k in top_ks if k < vocab_size), default=0),
        any_top_p=any(p.top_p < 1.0 for p in sampled),
        any_open_top_p=any(
            p.top_p < 1.0 and k == vocab_size for p, k in zip(sampled, top_ks, strict=True)
        ),
        any_min_p=any(p.min_p > 0.0 for p in sampled),
    )


@dataclass
class _EditPlan:
    """Which requests edit their logits, by index into the batch."""

    reqs: list[Req]
    biased: list[int]
    penalised: list[int]
    held: list[int]  # still short of min_tokens

    @classmethod
    def of(cls, reqs: list[Req]) -> _EditPlan:
        indexed = list(enumerate(reqs))
        return cls(
            reqs=reqs,
            biased=[i for i, r in indexed if r.sampling.logit_bias],
            penalised=[i for i, r in indexed if r.sampling.has_penalties],
            held=[i for i, r in indexed if is_held(r)],
        )

    @property
    def follow_output(self) -> bool:
        return bool(self.penalised or self.held)

    @property
    def slots(self) -> list[int]:
        editing = sorted({*self.biased, *self.penalised, *self.held})
        slots = [0] * len(self.reqs)
        for slot, i in enumerate(editing, start=1):
            slots[i] = slot
        return slots

    def add_columns(self, columns: Columns, vocab_size: int) -> None:
        slots = self.slots
        if any(slots):
            columns.ints("slots", slots)
        if self.biased:
            biases = [self.reqs[i].sampling.logit_bias for i in self.biased]
            columns.ragged("bias", [slots[i] for i in self.biased], [list(b) for b in biases])
            columns.floats("bias_values", list(chain.from_iterable(b.values() for b in biases)))
        if self.held:
            ends = [ending_tokens(self.reqs[i], vocab_size) for i in self.held]
            columns.ints("min_tokens", [min(r.sampling.min_tokens, 2**62) for r in self.reqs])
            columns.ragged("forbidden", [slots[i] for i in self.held], ends)
        if self.penalised:
            rows = [slots[i] for i in self.penalised]
            for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
                columns.floats(name, [getattr(r.sampling, name) for r in self.reqs])
            columns.ragged("prompt", rows, [self.reqs[i].prompt_ids for i in self.penalised])
            columns.ragged("output", rows, [self.reqs[i].output_ids for i in self.penalised])

    def build(
        self, sent: dict[str, Tensor], vocab_size: int, device: torch.device
    ) -> LogitEdits | None:
        if "slots" not in sent:
            return None
        shape = (len({*self.biased, *self.penalised, *self.held}) + 1, vocab_size)
        bias, min_tokens, penalties = None, None, None
        if self.biased:
            bias = torch.zeros(shape, device=device)
            bias[sent["bias_rows"], sent["bias_tokens"]] = sent["bias_values"].float()
        if self.held:
            forbidden = torch.zeros(shape, dtype=torch.bool, device=device)
            forbidden[sent["forbidden_rows"], sent["forbidden_tokens"]] = True
            min_tokens = MinTokens(sent["min_tokens"], forbidden)
        if self.penalised:
            penalties = _penalties(sent, torch.zeros(shape, device=device))
        return LogitEdits(sent["slots"], bias, penalties, min_tokens)


def is_held(req: Req) -> bool:
    """Whether its next token may not end it yet; masks of grammars see to that themselves."""
    return req.grammar is None and len(req.output_ids) < req.sampling.min_tokens


def _penalties(sent: dict[str, Tensor], counts: Tensor) -> Penalties:
    prompt_seen = torch.zeros_like(counts, dtype=torch.bool)
    prompt_seen[sent["prompt_rows"], sent["prompt_tokens"]] = True
    _count(counts, sent["output_rows"], sent["output_tokens"])
    return Penalties(
        frequency=sent["frequency_penalty"].float(),
        presence=sent["presence_penalty"].float(),
        repetition=sent["repetition_penalty"].float(),
        prompt_seen=prompt_seen,
        counts=counts,
    )


def _count(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    ones = torch.ones_like(tokens, dtype=counts.dtype)
    counts.index_put_((rows, tokens), ones, accumulate=True)


def ending_tokens(req: Req, vocab_size: int) -> list[int]:
    """Each once."""
    eos = () if req.sampling.ignore_eos else req.eos_ids
    return sorted(token for token in {*eos, *req.sampling.stop_token_ids} if token < vocab_size)
