from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine.core.columns import Columns
from specengine.core.random_streams import Stream, draw
from specengine.core.request import Req
from specengine.core.sampling import SamplingParams
from specengine.core.sampling_batch import SamplingBatch

CPU = torch.device("cpu")
VOCAB = 10
GREEDY: dict[str, Any] = {"temperature": 0.0}


def make_req(options: dict[str, Any], output: list[int] | None = None, seed: int = 0) -> Req:
    params = SamplingParams(**{"max_tokens": None, **options})
    eos = frozenset({9})
    return Req("r", [1, 2, 2], params, eos_ids=eos, seed=seed, output_ids=output or [])


def build(*reqs: Req) -> SamplingBatch:
    return SamplingBatch.from_reqs(list(reqs), VOCAB, CPU)


def test_a_plain_greedy_batch_holds_no_tensor() -> None:
    reqs = [make_req(GREEDY), make_req({"top_k": 1})]
    batch = build(*reqs)
    assert batch.is_plain
    assert batch.all_greedy
    assert batch.batch_size == 2
    assert (batch.output_pos, batch.random, batch.edits) == (None, None, None)
    reqs[0].output_ids.append(3)
    batch.refresh(reqs)
    assert batch.output_pos is None


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"logit_bias": {1: 2.0}}, {"bias"}),
        ({"frequency_penalty": 1.0}, {"penalties"}),
        ({"min_tokens": 2}, {"min_tokens"}),
        ({"min_tokens": 2, "repetition_penalty": 2.0}, {"min_tokens", "penalties"}),
    ],
)
def test_only_what_was_asked_for_exists(options: dict[str, Any], groups: set[str]) -> None:
    batch = build(make_req(GREEDY), make_req({**GREEDY, **options}))
    assert batch.edits is not None
    assert batch.edits.slots.tolist() == [0, 1]
    names = ("bias", "penalties", "min_tokens")
    assert {name for name in names if getattr(batch.edits, name) is not None} == groups
    assert (batch.output_pos is None) == (groups == {"bias"})


def test_min_tokens_reached_already_asks_nothing() -> None:
    assert build(make_req({**GREEDY, "min_tokens": 2}, [3, 3])).is_plain


def test_flags_say_which_filters_somebody_wants() -> None:
    random = build(make_req({}), make_req({**GREEDY, "top_p": 0.5})).random
    assert random is not None
    assert random.any_greedy
    assert (random.any_top_p, random.any_min_p, random.max_top_k) == (False, False, 0)
    random = build(make_req({"top_k": 4, "top_p": 0.5}), make_req({"top_k": 99})).random
    assert random is not None
    assert random.max_top_k == 4
    assert random.any_top_p
    assert not random.any_open_top_p
    assert random.top_k.tolist() == [4, VOCAB]
    random = build(make_req({"top_p": 0.5, "min_p": 0.1})).random
    assert random is not None
    assert random.any_open_top_p
    assert random.any_min_p


def test_parameters_reach_the_device() -> None:
    options = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.25, "min_tokens": 5}
    batch = build(make_req(options, [4], seed=2**63 + 5), make_req(GREEDY, [4, 4], seed=-3))
    random, edits = batch.random, batch.edits
    assert random is not None
    assert edits is not None
    assert edits.min_tokens is not None
    assert batch.output_pos is not None
    assert batch.output_pos.tolist() == [1, 2]
    torch.testing.assert_close(random.temperature, torch.tensor([0.7, 1.0]))
    assert random.top_p.tolist() == [0.9, 1.0]
    assert random.min_p.tolist() == [0.25, 0.0]
    assert random.greedy.tolist() == [False, True]
    assert random.seeds.tolist() == [5 - 2**63, -3], "seeds wrap around in 64 bits"
    assert edits.min_tokens.min_tokens.tolist() == [5, 0]
    assert edits.min_tokens.forbidden.nonzero().tolist() == [[1, 9]]


def test_logprobs_asked_for() -> None:
    reqs = [make_req({"logprobs": k}) for k in (None, 0, 3)]
    assert build(*reqs).logprobs == [None, 0, 3]
    assert build(*reqs).max_logprobs == 3
    assert build(reqs[0]).max_logprobs is None


OPTIONS: list[dict[str, Any]] = [
    {},
    GREEDY,
    {"frequency_penalty": 1.0},
    {**GREEDY, "repetition_penalty": 2.0},
    {"min_tokens": 3, "logit_bias": {4: 1.0}},
]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(OPTIONS),
            st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=4), min_size=3, max_size=3),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_refreshing_equals_building_anew(
    cases: list[tuple[dict[str, Any], list[list[int]]]],
) -> None:
    reqs = [make_req(options) for options, _ in cases]
    batch = build(*reqs)
    for step in range(3):
        for req, (_, rounds) in zip(reqs, cases, strict=True):
            req.output_ids += rounds[step]
        batch.refresh(reqs)
        if batch.output_pos is not None:
            assert batch.output_pos.tolist() == [len(req.output_ids) for req in reqs]
        assert torch.equal(_counts(batch, reqs), _counts(build(*reqs), reqs))


def _counts(batch: SamplingBatch, reqs: list[Req]) -> Tensor:
    """Output counts of the requests that have penalties."""
    if batch.edits is None or batch.edits.penalties is None:
        return torch.empty(0)
    penalised = [i for i, req in enumerate(reqs) if req.sampling.has_penalties]
    assert not batch.edits.penalties.counts[0].any(), "row 0 is everybody else's"
    return batch.edits.penalties.counts[batch.edits.slots[penalised]]


def test_columns_cross_in_one_buffer() -> None:
    columns = Columns()
    columns.ints("a", [1, -(2**63)])
    columns.floats("b", [0.1, -1e300])
    columns.ragged("c", [4, 7], [[1, 2], [3]])
    columns.ints("d", [])
    sent = columns.send(CPU)
    assert {name: column.tolist() for name, column in sent.items()} == {
        "a": [1, -(2**63)],
        "b": [0.1, -1e300],
        "c_rows": [4, 4, 7],
        "c_tokens": [1, 2, 3],
        "d": [],
    }
    assert len({column.untyped_storage().data_ptr() for column in sent.values()}) == 1


def test_streams_of_one_key_differ() -> None:
    seeds, positions = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    draws = {tuple(draw(seeds, positions, stream).tolist()) for stream in Stream}
    assert len(draws) == len(Stream) == 4
