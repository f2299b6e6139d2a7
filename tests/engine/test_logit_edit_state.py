"""Tables of logit edits on the device, against the edits of rounds on the host."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from specengine.core.request import Req
from specengine.core.rows import RowBatch
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch
from specengine.draft.choice import DraftChoice
from specengine.engine.round import edits as edits_module
from specengine.engine.round.edits import ChainEdits, LogitEditState, edits_logits, expanded
from specengine.kernels.sample.edit_rows import edit_rows_
from specengine.kernels.sample.types import DraftedNodes
from specengine.layers.logits import RowMap, edit_logits

CPU = torch.device("cpu")
VOCAB = 40
OPTIONS: list[dict[str, Any]] = [
    {"logit_bias": {3: 2.0, 39: -5.0}},
    {"frequency_penalty": 0.5, "presence_penalty": 0.25},
    {"repetition_penalty": 1.5, "min_tokens": 9, "stop_token_ids": (4, 5)},
    {"temperature": 0.7},
    {"min_tokens": 3},
]


def make_req(row: int, options: dict[str, Any], output: list[int]) -> Req:
    req = Req("r", [1, 2, 2, row], SamplingParams(max_tokens=None, **options), frozenset({6}))
    req.output_ids, req.req_pool_idx = output, row
    req.kv_len = req.seq_len - 1
    return req


def check(edits: LogitEditState, reqs: list[Req]) -> None:
    """One node each: the next token of plain decoding."""
    rows = torch.tensor([req.req_pool_idx for req in reqs])
    edits.write(reqs, rows)
    logits = torch.randn(len(reqs), VOCAB, generator=torch.Generator().manual_seed(1))
    sampling = SamplingBatch.from_reqs(reqs, VOCAB, CPU)
    expected = edit_logits(logits, sampling, RowMap())
    starts = torch.tensor([req.kv_len for req in reqs])
    roots = torch.tensor([[req.last_token] for req in reqs])
    edit_rows_(logits, edits.tables, DraftedNodes(rows, starts, roots))
    assert torch.equal(logits, expected)


@pytest.fixture
def reqs() -> list[Req]:
    return [make_req(i + 1, one, [7, 8, 8][: i + 1]) for i, one in enumerate(OPTIONS)]


def test_min_tokens_leave_the_end_to_the_grammar() -> None:
    """It may allow nothing but an end before min_tokens."""
    options = {"frequency_penalty": 0.5, "min_tokens": 9, "stop_token_ids": (4, 5)}
    req = make_req(2, options, [7, 8])
    req.grammar = cast(Any, object())
    check(LogitEditState(8, VOCAB, CPU), [req])


def test_tables_edit_as_the_host_does(reqs: list[Req]) -> None:
    assert [edits_logits(req) for req in reqs] == [True, True, True, False, False]
    edits = LogitEditState(8, VOCAB, CPU)
    check(edits, reqs)
    check(edits, reqs[::-1])


@pytest.mark.parametrize("narrow", [True, False], ids=["some of the vocabulary", "all"])
def test_chains_are_edited_as_on_the_host(narrow: bool, reqs: list[Req]) -> None:
    """Level by level; drafts above are counted, and min_tokens of one request end halfway."""
    reqs.append(make_req(6, {"min_tokens": 5, "stop_token_ids": (2, 39)}, [7, 8, 8]))
    edits, target_ids = LogitEditState(8, VOCAB, CPU), torch.arange(1, VOCAB, 2) if narrow else None
    rows = torch.tensor([req.req_pool_idx for req in reqs])
    edits.write(reqs, rows)
    lens, roots = ([req.kv_len for req in reqs], [req.last_token for req in reqs])
    batch = RowBatch(rows, torch.tensor(lens), torch.tensor(roots))
    of_chains = ChainEdits(edits.tables, batch)
    choice = DraftChoice(SamplingBatch.from_reqs(reqs, VOCAB, CPU), target_ids)
    paths, draw, held = torch.zeros(len(reqs), 0).long(), torch.Generator().manual_seed(1), []
    for token in (9, 9, 8, 39):
        width = VOCAB if target_ids is None else len(target_ids)
        logits = torch.randn(len(reqs), width, generator=draw)
        expected = choice._edited(logits, paths)
        full = expanded(logits, target_ids, VOCAB)
        of_chains.apply(full)
        assert torch.equal(full, expected)
        held.append(bool(full[-1, 39].isinf()))
        tokens = torch.full_like(rows, token)
        of_chains.advance(tokens)
        paths = torch.cat([paths, tokens[:, None]], dim=1)
    assert held == [True, True, False, False]


def test_tokens_counted_on_the_device_are_not_written_again(reqs: list[Req]) -> None:
    edits, penalised = LogitEditState(8, VOCAB, CPU), reqs[1]
    check(edits, reqs)
    row = torch.tensor([penalised.req_pool_idx])
    batch = RowBatch(row, torch.tensor([penalised.kv_len]), torch.tensor([8]))
    edits.count(batch, torch.tensor([[9, 9, 30]]), torch.tensor([1]))
    edits.note([penalised, reqs[3]], [[9, 9], [1]])
    penalised.output_ids += [9, 9]
    penalised.kv_len += 2
    slot = int(edits.tables.slots[row])
    edits.tables.counts[slot, 33] = 50.0  # would be gone, were it written again
    edits.write(reqs, torch.tensor([req.req_pool_idx for req in reqs]))
    assert edits.tables.counts[slot, [9, 30, 33]].tolist() == [2.0, 0.0, 50.0]


def test_tokens_of_host_rounds_are_written(reqs: list[Req]) -> None:
    edits = LogitEditState(8, VOCAB, CPU)
    check(edits, reqs)
    for req in reqs:
        req.output_ids.append(11)
        req.kv_len += 1
    check(edits, reqs)


def test_slot_of_a_request_that_left_is_cleared_for_the_next(
    reqs: list[Req], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edits_module, "MAX_EDITING", 2)
    edits = LogitEditState(3, VOCAB, CPU)
    for first in (0, 1, 2, 0):
        pair = [reqs[first], reqs[(first + 1) % 3]]
        for row, req in enumerate(pair, start=1):
            req.req_pool_idx = row
        check(edits, pair)
