"""Which graph serves a batch, and what it takes from the host."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from specengine.core.batch import ForwardMode, ModelWorkerBatch, Tree
from specengine.engine.ragged_build import _CROWDS
from specengine.runner.extend_graphs import SHAPES
from specengine.runner.ragged_forms import (
    CROWD,
    MAX_TOKENS,
    Form,
    Inputs,
    Sizes,
    ladder,
    num_inputs,
    octaves,
    pack,
)

SIZES = Sizes((1, 2, 4, 8, 12, 16), (1, 2, 5))


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


def form_of(batch: ModelWorkerBatch, sizes: Sizes = SIZES) -> Form:
    form = sizes.form_of(batch)
    assert isinstance(form, Form), form
    return form


def packed(batch: ModelWorkerBatch, form: Form) -> Inputs:
    values = torch.from_numpy(pack(batch, batch.input_ids, form))
    assert len(values) == num_inputs(form)
    inputs = Inputs.of(values, form)
    assert not any(one.storage_offset() % 2 for one in vars(inputs).values())
    return inputs


def test_sizes_are_few() -> None:
    assert ladder(200) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 200]
    assert ladder(1) == [1]
    assert octaves([1, 2, 3, 4, 6, 8, 12, 16]) == [1, 2, 4, 8, 16]
    assert octaves([3]) == [3]
    assert octaves([1, 5, 100]) == [1, 5, 100]


def test_why_a_batch_has_no_form() -> None:
    exactly = Sizes((2, 4), (3,), padding=False)
    assert SIZES.form_of(verify([6])) == "more tokens than any captured"
    assert SIZES.form_of(verify([1] * 17)) == "batch larger than any captured"
    wide = Sizes((512,), (MAX_TOKENS,))
    assert wide.form_of(verify([MAX_TOKENS, 1])) == "more tokens than any captured"
    assert exactly.form_of(verify([3, 3, 3])) == "batch size not captured, padding off"
    assert exactly.form_of(verify([3, 2])) == "ragged, padding off"
    assert form_of(verify([3, 3]), exactly).num_tokens == 6


def test_prompts_have_few_forms() -> None:
    sizes = Sizes((1, 2, 64), (1, 4), prompts=(64, 256))
    drawn = [[5], [60], [64, 1], [3, 200], [256], [30] * 8]
    forms = [form_of(verify(lens, rows=[]), sizes) for lens in drawn]
    assert [one.num_tokens for one in forms] == [64, 64, 256, 256, 256, 256]
    assert len(set(forms)) == 2
    for lens, form in zip(drawn, forms, strict=True):
        inputs = packed(verify(lens, rows=[]), form)
        assert int(inputs.extend_lens_N.max()) <= form.width
        assert int(inputs.extend_lens_N.sum()) == form.num_tokens
        assert not inputs.row_T[sum(lens) :].any()
        assert int(inputs.place_T[sum(lens) :].max() if sum(lens) < form.num_tokens else 0) < 256
    assert form_of(verify([4, 2], rows=[]), sizes).width == 4
    for lens in ([257], [30] * 9):
        assert sizes.form_of(verify(lens, rows=[])) == "more tokens than any captured"
    exactly = Sizes((1, 2), (1, 4), padding=False, prompts=(64,))
    assert exactly.form_of(verify([5])) == "more tokens than any captured"


def test_crowds_of_short_prompts_have_forms_of_their_own() -> None:
    sizes = Sizes((1, 2, 64), (1, 4), prompts=(64, 256), crowds=(512, 1024))
    drawn = [[5] * 9, [30] * 17, [30] * 18, [200] * 3, [250, 250, 12], [1] * 63 + [256]]
    forms = [form_of(verify(lens, rows=[]), sizes) for lens in drawn]
    assert [one.num_tokens for one in forms] == [512, 512, 1024, 1024, 512, 512]
    assert len(set(forms)) == 2
    for lens, form in zip(drawn, forms, strict=True):
        inputs = packed(verify(lens, rows=[]), form)
        assert inputs.extend_lens_N.tolist()[: len(lens)] == lens
        assert int(inputs.extend_lens_N.max()) <= form.width == 256
        assert int(inputs.extend_lens_N.sum()) == form.num_tokens
    assert form_of(verify([30] * 8, rows=[]), sizes).num_requests == 9
    for lens in ([257, 1, 1], [5] * 65, [200] * 6):
        assert sizes.form_of(verify(lens, rows=[])) == "more tokens than any captured"


def test_what_crowds_are_cut_to() -> None:
    sizes = Sizes((1, 2, 64), (1, 4), prompts=(64, 256), crowds=(512, 1024))
    cut = [[5] * 65, [200] * 6, [5] * 64 + [256]]
    whole = [[5] * 64, [257] * 5, [4] * 65, [200] * 5, []]
    assert [sizes.limits_of_parts(verify(lens, rows=[])) for lens in cut] == [(1024, 64)] * 3
    assert [sizes.limits_of_parts(verify(lens, rows=[])) for lens in whole] == [None] * 5
    assert sizes.limits_of_parts(verify([5] * 65)) is None, "logits of every row"
    assert sizes.limits_of_parts(verify([5] * 65, rows=[], num_past=0)) is None
    for other in (SIZES, replace(sizes, padding=False)):
        assert other.limits_of_parts(verify([30] * 65, rows=[])) is None


def test_prefills_of_the_target_are_cut_before_drafters_prompts_are() -> None:
    """What a drafter takes of them in parts is a copy then: see PartsForward."""
    assert max(shape.tokens for shape in SHAPES) <= _CROWDS[-1]
    assert max(shape.requests for shape in SHAPES) <= CROWD


def test_the_logits_asked_for() -> None:
    found = [form_of(verify([2, 2], rows)).logits for rows in (None, [], [1, 3])]
    assert found == ["every", "none", "chosen"]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=16),
    st.sampled_from([None, 0, 4]),
)
def test_the_filling_sees_nothing_but_itself(lens: list[int], num_past: int | None) -> None:
    batch = verify(lens, num_past=num_past)
    form = form_of(batch)
    inputs = packed(batch, form)
    requests, tokens, past = len(lens), sum(lens), num_past or 0
    assert form.width >= max(lens)
    assert inputs.extend_lens_N.tolist()[:requests] == lens
    assert inputs.qo_indptr.tolist() == [0, *inputs.extend_lens_N.cumsum(0).tolist()]
    assert inputs.qo_indptr[-1] == form.num_tokens
    assert int(inputs.extend_lens_N.max()) <= form.width
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
def test_nobody_fits_where_somebody_does(lens: list[int]) -> None:
    """Graphs are captured on filling alone."""
    form = form_of(verify(lens))
    nobody = ModelWorkerBatch(form.mode, torch.empty(0), [], [], [], [], None)
    inputs = packed(nobody, form)
    assert inputs.qo_indptr[-1] == form.num_tokens
    assert int(inputs.extend_lens_N.max()) <= form.width
