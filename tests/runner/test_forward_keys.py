"""Which graph serves a batch, and what it takes from the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.batch import ForwardMode, ModelWorkerBatch
from specengine.core.tree import Tree
from specengine.engine.forward_graphs_build import _LARGE_PREFILLS
from specengine.runner.forward_graphs.inputs import ForwardInputs, num_forward_inputs, pack_forward
from specengine.runner.forward_graphs.keys import (
    LARGE_MAX_WIDTH,
    MAX_TOKENS,
    PREFILL_KEYS,
    ForwardKey,
    GraphSizes,
    PrefillKey,
    ladder,
    octaves,
)

SIZES = GraphSizes((1, 2, 4, 8, 12, 16), (1, 2, 5))


def verify(
    lens: list[int], rows: list[int] | None = None, num_past: int | None = None
) -> ModelWorkerBatch:
    """Requests in rows 1, 2, ... of the page table with prefixes of 10, 20, ..."""
    tree = None
    if num_past is not None:
        mask = torch.ones(len(lens), max(lens), num_past + max(lens), dtype=torch.bool)
        tree = Tree(torch.arange(sum(lens)) % 3, mask, num_past)
    return ModelWorkerBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        input_ids=torch.arange(100, 100 + sum(lens)),
        req_pool_indices=[i + 1 for i in range(len(lens))],
        prefix_lens=[10 * (i + 1) for i in range(len(lens))],
        extend_lens=lens,
        logits_rows=rows,
        sampling=None,
        tree=tree,
    )


def key_of(batch: ModelWorkerBatch, sizes: GraphSizes = SIZES) -> ForwardKey:
    key = sizes.key_of(batch)
    assert isinstance(key, ForwardKey), key
    return key


def packed(batch: ModelWorkerBatch, key: ForwardKey) -> ForwardInputs:
    values = torch.from_numpy(pack_forward(batch, batch.input_ids, key))
    assert len(values) == num_forward_inputs(key)
    inputs = ForwardInputs.of(values, key)
    assert not any(one.storage_offset() % 2 for one in vars(inputs).values())
    return inputs


def test_ladder_and_octaves_give_few_sizes() -> None:
    assert ladder(200) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 200]
    assert ladder(1) == [1]
    assert octaves([1, 2, 3, 4, 6, 8, 12, 16]) == [1, 2, 4, 8, 16]
    assert octaves([3]) == [3]
    assert octaves([1, 5, 100]) == [1, 5, 100]


def test_batch_without_a_key_gives_the_reason() -> None:
    exactly = GraphSizes((2, 4), (3,), padding=False)
    assert SIZES.key_of(verify([6])) == "more tokens than any captured"
    assert SIZES.key_of(verify([1] * 17)) == "batch larger than any captured"
    wide = GraphSizes((512,), (MAX_TOKENS,))
    assert wide.key_of(verify([MAX_TOKENS, 1])) == "more tokens than any captured"
    assert exactly.key_of(verify([3, 3, 3])) == "batch size not captured, padding off"
    assert exactly.key_of(verify([3, 2])) == "ragged, padding off"
    assert key_of(verify([3, 3]), exactly).num_tokens == 6


def test_prompts_of_few_requests_share_few_keys() -> None:
    sizes = GraphSizes((1, 2, 64), (1, 4), prefills=(64, 256))
    drawn = [[5], [60], [64, 1], [3, 200], [256], [30] * 8]
    keys = [key_of(verify(lens, rows=[]), sizes) for lens in drawn]
    assert [one.num_tokens for one in keys] == [64, 64, 256, 256, 256, 256]
    assert len(set(keys)) == 2
    for lens, key in zip(drawn, keys, strict=True):
        inputs = packed(verify(lens, rows=[]), key)
        assert int(inputs.extend_lens_N.max()) <= key.width
        assert int(inputs.extend_lens_N.sum()) == key.num_tokens
        assert not inputs.row_T[sum(lens) :].any()
        assert int(inputs.place_T[sum(lens) :].max() if sum(lens) < key.num_tokens else 0) < 256
    assert key_of(verify([4, 2], rows=[]), sizes).width == 4
    for lens in ([257], [30] * 9):
        assert sizes.key_of(verify(lens, rows=[])) == "more tokens than any captured"
    exactly = GraphSizes((1, 2), (1, 4), padding=False, prefills=(64,))
    assert exactly.key_of(verify([5])) == "more tokens than any captured"


def test_large_prefills_of_short_prompts_have_keys_of_their_own() -> None:
    sizes = GraphSizes((1, 2, 64), (1, 4), prefills=(64, 256), large_prefills=(512, 1024))
    drawn = [[5] * 9, [30] * 17, [30] * 18, [200] * 3, [250, 250, 12], [1] * 63 + [256]]
    keys = [key_of(verify(lens, rows=[]), sizes) for lens in drawn]
    assert [one.num_tokens for one in keys] == [512, 512, 1024, 1024, 512, 512]
    assert len(set(keys)) == 2
    for lens, key in zip(drawn, keys, strict=True):
        inputs = packed(verify(lens, rows=[]), key)
        assert inputs.extend_lens_N.tolist()[: len(lens)] == lens
        assert int(inputs.extend_lens_N.max()) <= key.width == 256
        assert int(inputs.extend_lens_N.sum()) == key.num_tokens
    assert key_of(verify([30] * 8, rows=[]), sizes).num_requests == 9
    for lens in ([257, 1, 1], [5] * 65, [200] * 6):
        assert sizes.key_of(verify(lens, rows=[])) == "more tokens than any captured"


def test_split_limits_are_given_only_for_prefills_that_no_graph_holds() -> None:
    sizes = GraphSizes((1, 2, 64), (1, 4), prefills=(64, 256), large_prefills=(512, 1024))
    cut = [[5] * 65, [200] * 6, [5] * 64 + [256]]
    whole = [[5] * 64, [257] * 5, [4] * 65, [200] * 5, []]
    assert [sizes.split_limits(verify(lens, rows=[])) for lens in cut] == [(1024, 64)] * 3
    assert [sizes.split_limits(verify(lens, rows=[])) for lens in whole] == [None] * 5
    assert sizes.split_limits(verify([5] * 65)) is None, "logits of every row"
    assert sizes.split_limits(verify([5] * 65, rows=[], num_past=0)) is None
    for other in (SIZES, replace(sizes, padding=False)):
        assert other.split_limits(verify([30] * 65, rows=[])) is None


@pytest.mark.parametrize("key", PREFILL_KEYS, ids=str)
def test_no_prefill_that_a_graph_of_the_target_holds_is_read_in_parts(key: PrefillKey) -> None:
    """So the features that a drafter reads in parts are copies: see PartsForward. Prompts of at
    most LARGE_MAX_WIDTH tokens may be read in parts."""
    sizes = GraphSizes((1, 8), (4,), prefills=(64, 2048), large_prefills=_LARGE_PREFILLS)
    most = min(key.tokens, key.requests * LARGE_MAX_WIDTH)
    per_request = max(most // key.requests, 5)
    lens = [per_request] * (most // per_request)
    assert key.width >= max(lens)
    assert sizes.split_limits(verify(lens, rows=[])) is None


def test_key_tells_which_logits_are_asked_for() -> None:
    found = [key_of(verify([2, 2], rows)).logits for rows in (None, [], [1, 3])]
    assert found == ["every", "none", "chosen"]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=16),
    st.sampled_from([None, 0, 4]),
)
def test_padding_requests_attend_to_themselves_alone(lens: list[int], num_past: int | None) -> None:
    batch = verify(lens, num_past=num_past)
    key = key_of(batch)
    inputs = packed(batch, key)
    requests, tokens, past = len(lens), sum(lens), num_past or 0
    assert key.width >= max(lens)
    assert inputs.extend_lens_N.tolist()[:requests] == lens
    assert inputs.qo_indptr.tolist() == [0, *inputs.extend_lens_N.cumsum(0).tolist()]
    assert inputs.qo_indptr[-1] == key.num_tokens
    assert int(inputs.extend_lens_N.max()) <= key.width
    assert (inputs.seq_lens_N == inputs.prefix_lens_N + inputs.extend_lens_N).all()
    assert not inputs.rows_N[requests:].any()
    assert (inputs.prefix_lens_N[requests:] == past).all()
    assert not inputs.row_T[tokens:].any()
    assert (inputs.base_T >= 0).all()
    places = [10 * (i + 1) + j for i, count in enumerate(lens) for j in range(count)]
    assert inputs.place_T.tolist()[:tokens] == places
    assert inputs.token_T.tolist()[:tokens] == list(range(100, 100 + tokens))
    if num_past is not None:
        firsts = [10 * (i + 1) - past for i, count in enumerate(lens) for _ in range(count)]
        assert inputs.base_T.tolist()[:tokens] == firsts
        assert inputs.depth_T.tolist()[:tokens] == [i % 3 for i in range(tokens)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=16))
def test_padding_alone_fits_every_key(lens: list[int]) -> None:
    """Graphs are captured on padding alone."""
    key = key_of(verify(lens))
    empty = ModelWorkerBatch(key.mode, torch.empty(0), [], [], [], [], None)
    inputs = packed(empty, key)
    assert inputs.qo_indptr[-1] == key.num_tokens
    assert int(inputs.extend_lens_N.max()) <= key.width
