"""The gated delta rule over prompts: chunks, steps and saves agree, and Triton's kernels with
them."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specengine.kernels.delta import delta_chunks_triton, delta_prompt_triton, delta_rule
from specengine.kernels.delta.types import DeltaInputs, DeltaState, PromptBatch, Save
from tests.kernels.delta_world import (
    CPU,
    SHAPE,
    World,
    assert_near,
    cut,
    decode,
    inputs,
    make_world,
    moved,
)

# A card takes prompts of float32 token by token; its chunks are of other types (below).
IN_INTERPRETER = pytest.mark.parametrize("device", ["interpreter"], indirect=True)
# Of prompts side by side: shorter than the convolution, and longer than the 16 tokens that a
# program makes ready.
LENS = [1, 18, 2, 21, 3, 5]
PREFIXES = [0, 0, 3, 8, 1, 0]
ROWS = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def world() -> World:
    return make_world()


@pytest.mark.parametrize("count", [1, 2, 5, 63, 64, 65, 150])
@pytest.mark.parametrize("is_new", [False, True])
def test_prompt_in_chunks_equals_steps(count: int, is_new: bool, world: World) -> None:
    given, other = inputs(count), world.copy()
    batch = PromptBatch(torch.tensor([2]), [count], [0 if is_new else 3])
    found = delta_rule.extend(given, world.weights, world.states[0], batch, SHAPE)
    if is_new:
        other.states[0].inputs[2], other.states[0].memory[2] = 0, 0
    torch.testing.assert_close(found, decode(other, given, 2), atol=1e-5, rtol=1e-4)
    for name in ("inputs", "memory"):
        one, its = getattr(world.states[0], name), getattr(other.states[0], name)
        torch.testing.assert_close(one, its, atol=1e-5, rtol=1e-4)


def test_saved_state_is_that_behind_its_prefix(world: World) -> None:
    given, other = inputs(90), world.copy()
    saves = (Save(0, 70, 5), Save(1, 2, 4), Save(1, 9, 6))
    batch = PromptBatch(torch.tensor([1, 3]), [80, 10], [0, 4], saves)
    whole = delta_rule.extend(given, world.weights, world.states[0], batch, SHAPE)
    for row, rows, is_new, slot in (
        (1, slice(0, 70), True, 5),
        (3, slice(80, 82), False, 4),
        (3, slice(82, 89), False, 6),
    ):
        part = PromptBatch(torch.tensor([row]), [rows.stop - rows.start], [0 if is_new else 4])
        out = delta_rule.extend(cut(given, rows), other.weights, other.states[0], part, SHAPE)
        torch.testing.assert_close(out, whole[rows], atol=1e-5, rtol=1e-4)
        for name in ("inputs", "memory"):
            found = getattr(world.states[0], name)[slot]
            expected = getattr(other.states[0], name)[row]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_triton_takes_prompts_in_as_the_reference(world: World, device: torch.device) -> None:
    ours, saves = world.copy(device), (Save(0, 1, 6), Save(0, 4, 2), Save(2, 3, 0))
    batch = PromptBatch(torch.tensor([1, 3, 5]), [5, 1, 7], [0, 9, 2], saves)
    outs = [
        delta_rule.extend(
            inputs(13, 1, place), one.weights, one.states[0], moved(batch, place), SHAPE,
            backend=backend,
        )
        for one, place, backend in ((ours, device, "triton"), (world, CPU, "torch"))
    ]  # fmt: skip
    assert_near(*outs)
    ours.assert_near(world)


def assert_prompts_are_taken_in_alike(given: DeltaInputs, batch: PromptBatch, world: World) -> None:
    other = world.copy()
    outs = [
        delta_rule.extend(given, world.weights, one.states[0], batch, SHAPE, backend=backend)
        for one, backend in ((world, "triton"), (other, "torch"))
    ]
    torch.testing.assert_close(*outs, atol=2e-5, rtol=1e-4)
    for name in ("inputs", "memory"):
        found, expected = (getattr(one.states[0], name)[1:] for one in (world, other))
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("are_alike", [False, True])
@IN_INTERPRETER
def test_triton_takes_long_prompts_in_as_the_reference(
    are_alike: bool, world: World, device: torch.device
) -> None:
    """Chunks that end at saves, and one after another. are_alike: all tokens have the same key, so
    that powers of a chunk's system grow beyond any digit."""
    saves = (Save(0, 1, 6), Save(0, 70, 2), Save(2, 64, 0))
    batch = PromptBatch(torch.tensor([1, 3, 5]), [150, 1, 66], [0, 9, 2], saves)
    assert delta_rule.chunks_are_faster(batch.lens)
    given = inputs(217)
    if are_alike:
        given = DeltaInputs(
            given.mixed_TC[:1].expand(217, -1), given.write_TM + 9, given.decay_TM - 9
        )
    assert_prompts_are_taken_in_alike(given, batch, world)


@IN_INTERPRETER
def test_triton_takes_a_prompt_in_in_chunks(world: World, device: torch.device) -> None:
    batch = PromptBatch(torch.tensor([1, 3]), [67, 2], [4, 0], (Save(0, 65, 6),))
    assert delta_rule.chunks_are_faster(batch.lens)
    assert_prompts_are_taken_in_alike(inputs(69), batch, world)


def take_in_steps(
    world: World, device: torch.device, requests: list[int], saves: tuple[Save, ...] = ()
) -> tuple[list[Tensor], DeltaState]:
    """Some of LENS by the kernels that go token by token, whatever their lengths -> outputs of
    each, and the state behind them."""
    delta_prompt_triton = pytest.importorskip("specengine.kernels.delta.delta_prompt_triton")
    ours, given = world.copy(device), inputs(sum(LENS), 1, device)
    of_each = torch.arange(sum(LENS)).split(LENS)
    rows = [token for one in requests for token in of_each[one].tolist()]
    lens = [LENS[one] for one in requests]
    batch = PromptBatch(
        torch.tensor([ROWS[one] for one in requests], device=device),
        lens,
        [PREFIXES[one] for one in requests],
        saves,
    )
    out = delta_prompt_triton.extend(cut(given, rows), ours.weights, ours.states[0], batch, SHAPE)
    return list(out.split(lens)), ours.states[0]


def test_triton_takes_prompts_of_any_length_in_token_by_token(
    world: World, device: torch.device
) -> None:
    found, state = take_in_steps(world, device, list(range(6)))
    batch = PromptBatch(torch.tensor(ROWS), LENS, PREFIXES)
    given = inputs(sum(LENS))
    expected = delta_rule.extend(given, world.weights, world.states[0], batch, SHAPE)
    atol, rtol = (1e-3, 1e-3) if found[0].is_cuda else (1e-5, 1e-4)
    torch.testing.assert_close(torch.cat(found).cpu(), expected, atol=atol, rtol=rtol)
    memory, expected = state.memory[1:].cpu(), world.states[0].memory[1:]
    torch.testing.assert_close(memory, expected, atol=atol, rtol=rtol)
    assert torch.equal(state.inputs[1:].cpu(), world.states[0].inputs[1:])


def test_prompts_keep_their_bits_beside_others(world: World, device: torch.device) -> None:
    """Nor do saves change them."""
    together, state = take_in_steps(world, device, [0, 1, 2, 4, 5])
    together.insert(3, together[0])  # in place of the longest, which is not taken
    saves = (Save(0, 1, 4), Save(0, 17, 5), Save(0, 18, 6), Save(1, 2, 1))
    for requests, kept in (([1], ()), ([1, 2], saves), ([2, 5, 1], ())):
        outs, its = take_in_steps(world, device, requests, kept)
        for request, out in zip(requests, outs, strict=True):
            assert torch.equal(out, together[request])
        assert torch.equal(its.memory[2], state.memory[2])
        if kept:  # at the end, in a slot besides the request's own
            assert torch.equal(its.memory[6], its.memory[2])
            assert torch.equal(its.inputs[6], its.inputs[2])


@pytest.mark.parametrize(
    ("lens", "is_faster"),
    [([512], True), ([256] * 8, True), ([30] * 64, False), ([2048] * 4, True), ([1], False)],
)
def test_form_of_prompts_is_the_one_that_was_timed_faster(lens: list[int], is_faster: bool) -> None:
    assert delta_rule.chunks_are_faster(lens) == is_faster


@pytest.mark.parametrize(
    ("dtype", "count", "form"),
    [
        (torch.bfloat16, 512, delta_chunks_triton),
        (torch.bfloat16, 9000, delta_chunks_triton),
        (torch.bfloat16, 1, delta_prompt_triton),
        (torch.float32, 512, delta_prompt_triton),
        (torch.float32, 9000, None),
    ],
)
def test_a_gpu_takes_prompts_of_16_bits_in_chunks(
    dtype: torch.dtype, count: int, form: ModuleType | None
) -> None:
    mixed: Any = SimpleNamespace(is_cuda=True, dtype=dtype)
    assert delta_rule._in_triton(mixed, [count]) is (form and form.extend)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("dtype", "in_chunks"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_prompts_on_a_gpu_equal_the_reference(dtype: torch.dtype, in_chunks: bool) -> None:
    from benchmarks.kernels.delta_rule import compare_prompts

    compare_prompts(dtype, in_chunks)
