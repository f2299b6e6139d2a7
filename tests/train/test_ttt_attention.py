"""Attention of training-time test, against its mask written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specengine.draft.train.attention import (
    BLOCK,
    FlexAttention,
    PaddedAttention,
    StepKV,
    TttAttention,
    document_blocks,
    merge,
)
from specengine.draft.train.documents import DraftRows
from tests.train.draft_training import packed, random_documents

HEADS, KV_HEADS, SIZE = 4, 2, 8


def make_rows(lens: list[int], multiple: int = 1) -> DraftRows:
    batch = packed(random_documents(lens, 50))
    nothing = torch.zeros(batch.num_tokens, 1)
    return DraftRows.of(batch, nothing, nothing, -(-sum(lens) // multiple) * multiple)


def draw(rows: int, steps: int) -> tuple[Tensor, list[StepKV]]:
    torch.manual_seed(rows + steps)

    def one(heads: int) -> Tensor:
        return torch.randn(rows, heads, SIZE, requires_grad=True)

    return one(HEADS), [StepKV(one(KV_HEADS), one(KV_HEADS)) for _ in range(steps)]


def written_out(q: Tensor, steps: list[StepKV], lens: list[int]) -> Tensor:
    """Keys of all steps side by side, [R, steps * R] scores under the mask."""
    document = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    causal = torch.ones(len(q), len(q)).tril().bool() & (document == document[:, None])
    mask = torch.cat([causal, *[torch.eye(len(q), dtype=torch.bool)] * (len(steps) - 1)], dim=1)
    k, v = (
        torch.cat(parts).repeat_interleave(HEADS // KV_HEADS, dim=1)
        for parts in ([step.k for step in steps], [step.v for step in steps])
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
    shares = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, v)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 4))
def test_padded_form_is_the_mask_written_out(lens: list[int], num_steps: int) -> None:
    q, steps = draw(sum(lens), num_steps)
    inputs = [q, *(x for step in steps for x in (step.k, step.v))]
    found = PaddedAttention(make_rows(lens)).attend(q, steps)
    expected = written_out(q, steps, lens)
    assert torch.allclose(found, expected, atol=1e-5)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("num_steps", [1, 2, 4])
@pytest.mark.parametrize("lens", [[BLOCK], [3, 150, 1, 77, 300, 130], [BLOCK, 2 * BLOCK, 5]])
def test_flex_form_is_the_mask_written_out(lens: list[int], num_steps: int) -> None:
    rows = make_rows(lens, BLOCK)
    q, steps = draw(rows.num_rows, num_steps)
    q, steps = q.detach(), [StepKV(step.k.detach(), step.v.detach()) for step in steps]
    found = FlexAttention(rows).attend(q, steps)  # it has no gradient on a CPU
    assert torch.allclose(found, written_out(q, steps, rows.lens), atol=1e-5)


def test_merging_has_the_gradient_of_the_mask_written_out() -> None:
    lens = [20, 1, 9]
    q, steps = draw(sum(lens), 3)
    inputs = [q, *(x for step in steps for x in (step.k, step.v))]
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    causal = torch.ones(30, 30).tril().bool() & (document == document[:, None])
    scores = torch.einsum("qhd,khd->qhk", q, steps[0].k.repeat_interleave(2, dim=1)) / SIZE**0.5
    scores = scores.masked_fill(~causal[:, None], float("-inf"))
    values = steps[0].v.repeat_interleave(2, dim=1)
    out = torch.einsum("qhk,khd->qhd", scores.softmax(-1), values)
    keys, own = (
        torch.stack(parts, dim=2)
        for parts in ([step.k for step in steps[1:]], [step.v for step in steps[1:]])
    )
    found = merge(q, out, scores.logsumexp(-1), keys, own)
    expected = written_out(q, steps, lens)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=5))
def test_block_mask_holds_every_block_that_is_seen(lens: list[int]) -> None:
    """And calls those full that are seen whole, so that no mask is applied to them."""
    rows = make_rows(lens, BLOCK)
    mask = document_blocks(rows.first_rows)
    places = torch.arange(rows.num_rows)
    seen = (places <= places[:, None]) & (places >= rows.first_rows[:, None])
    blocks = seen.view(rows.num_rows // BLOCK, BLOCK, -1, BLOCK).permute(0, 2, 1, 3).flatten(2)
    for query in range(len(blocks)):
        some = mask.kv_indices[0, 0, query, : mask.kv_num_blocks[0, 0, query]]
        full = mask.full_kv_indices[0, 0, query, : mask.full_kv_num_blocks[0, 0, query]]
        assert set(full.tolist()) == set(blocks[query].all(-1).nonzero()[:, 0].tolist())
        assert set(some.tolist()) | set(full.tolist()) == set(
            blocks[query].any(-1).nonzero()[:, 0].tolist()
        )
        assert not set(some.tolist()) & set(full.tolist())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention's gradient needs CUDA")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
def test_compiled_form_learns_what_the_padded_form_learns() -> None:
    lens = [3, 150, 1, 77, 300, 130]
    batch = packed(random_documents(lens, 50)).to(torch.device("cuda"))
    nothing = torch.zeros(batch.num_tokens, 1, device="cuda")
    rows = DraftRows.of(batch, nothing, nothing, 6 * BLOCK)
    torch.manual_seed(0)
    q = torch.randn(rows.num_rows, 9, 64, device="cuda", requires_grad=True)
    steps = [
        StepKV(*torch.randn(2, rows.num_rows, 3, 64, device="cuda").requires_grad_().unbind())
        for _ in range(4)
    ]
    weights = torch.randn_like(q)
    inputs = [q, *(x for step in steps for x in (step.k, step.v))]
    found: list[list[Tensor]] = []
    forms: list[TttAttention] = [PaddedAttention(rows), FlexAttention(rows)]
    for form in forms:
        out = form.attend(q, steps)
        found.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    for padded, flex in zip(*found, strict=True):
        assert torch.allclose(padded, flex, atol=2e-2, rtol=2e-2)
