"""The FlashInfer backend: what the host plans by, on any machine, and its kernels on a GPU."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from specengine.core.batch import AttentionBackend, ForwardBatch, ForwardMode
from specengine.core.errors import ConfigError
from specengine.runner.attention import flashinfer_wrappers, make_attention_backend
from specengine.runner.attention.flashinfer_backend import FlashInferAttentionBackend
from specengine.runner.attention.flashinfer_wrappers import (
    HostLengths,
    Wrapper,
    WrapperPool,
    slots_of,
)
from specengine.runner.attention.limits import check_layers
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from tests.runner import fake_flashinfer
from tests.runner.attention_cases import BUSHY, Case, Layer, every_mode, run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HAS_LIBRARY = torch.cuda.is_available() and find_spec("flashinfer") is not None
needs_library = pytest.mark.skipif(
    not HAS_LIBRARY, reason="no CUDA device, or flashinfer-python is not installed"
)
LAYERS = [Layer(9, 3, 64, 0.125), Layer(8, 2, 128, 0.09)]


def test_lengths_and_slots_of_a_ragged_batch() -> None:
    case = Case([(13, 8), (0, 5), (7, 0), (30, 1)])
    batch = case.batch(TorchAttentionBackend())
    lengths = HostLengths.of(batch)
    assert lengths.qo_indptr.tolist() == [0, 8, 13, 13, 14]
    assert lengths.kv_indptr.tolist() == [0, 21, 26, 33, 64]
    assert lengths.ones.tolist() == [1, 1, 1, 1]
    table = batch.req_to_token_pool.req_to_token
    expected = torch.cat([table[i + 1, : p + n] for i, (p, n) in enumerate(case.lens)])
    torch.testing.assert_close(slots_of(batch, lengths.num_keys), expected)


def test_a_capture_deals_its_rows_out_by_the_bounds() -> None:
    batch = Case([(0, 4), (0, 2)]).batch(TorchAttentionBackend())
    batch.extend_lens_cpu = [4, 4]
    assert HostLengths.of(batch).qo_indptr.tolist() == [0, 4, 6]


class Plan:
    pass


def test_a_wrapper_is_lent_until_its_plan_is_dropped_and_rests_a_turn() -> None:
    made: list[Wrapper] = []

    def make() -> Wrapper:
        made.append(Wrapper(None, copied=None))  # type: ignore[arg-type]
        return made[-1]

    pool, held = WrapperPool(make), []
    for _ in range(2):
        plan, wrapper = Plan(), pool.take()
        pool.lend(wrapper, plan)
        held.append(plan)
    assert len(made) == 2
    del plan
    held.clear()
    gc.collect()
    used: list[Any] = []
    for _ in range(4):
        plan, wrapper = Plan(), pool.take()
        used.append(wrapper)
        pool.lend(wrapper, plan)
        del plan
    assert used[0] is used[2]
    assert used[1] is used[3]
    assert {id(one) for one in used} == {id(one) for one in made}


def test_what_it_cannot_serve_is_refused_by_name() -> None:
    backend, layer = FlashInferAttentionBackend(CPU), LAYERS[0]
    check_layers(backend, [layer, replace(layer, layer_id=1)], torch.float16)
    with pytest.raises(ConfigError, match="flashinfer does not compute in float32"):
        check_layers(backend, [layer], torch.float32)
    with pytest.raises(ConfigError, match="heads of 16"):
        check_layers(backend, [Layer()], torch.float16)
    with pytest.raises(ConfigError, match="does not attend within chunks"):
        check_layers(backend, [replace(layer, attention_chunk=8)], torch.float16)
    with pytest.raises(ConfigError, match="the same heads, scale, window and"):
        check_layers(backend, [layer, replace(layer, sliding_window=8)], torch.float16)


def test_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    missing, there = (lambda name: None), (lambda name: object())
    monkeypatch.setattr("specengine.runner.attention.flashinfer_backend.find_spec", missing)
    with pytest.raises(ConfigError, match=r"flashinfer-python is not.*specengine\[cuda\]"):
        make_attention_backend("flashinfer", CUDA)
    monkeypatch.setattr("specengine.runner.attention.flashinfer_backend.find_spec", there)
    with pytest.raises(ConfigError, match="flashinfer needs a CUDA device"):
        make_attention_backend("flashinfer", CPU)


class Event:
    def synchronize(self) -> None:
        """Nothing is ever late."""

    def record(self, stream: object) -> None:
        """Nothing is recorded or waited for."""


@pytest.fixture
def in_pytorch(monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """The backend, over wrappers that compute on the CPU."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(flashinfer_wrappers, "_WORKSPACE_BYTES", 16)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return FlashInferAttentionBackend(CPU)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", every_mode(), ids=lambda case: case.mode.name)
def test_every_mode_over_wrappers_in_pytorch(
    case: Case, page_size: int, in_pytorch: AttentionBackend
) -> None:
    out, expected = run(replace(case, page_size=page_size), in_pytorch)
    torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_sliding_window_over_chains(window: int, in_pytorch: AttentionBackend) -> None:
    layer = Layer(sliding_window=window)
    for case in (Case([(0, 9), (13, 8)]), Case([(3, 1), (50, 1)], ForwardMode.DECODE)):
        out, expected = run(replace(case, layer=layer), in_pytorch)
        torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)


def test_softcap(in_pytorch: AttentionBackend) -> None:
    layer = Layer(softcap=0.5)
    for case in (Case([(0, 9), (13, 8)]), Case([(3, 1), (50, 1)], ForwardMode.DECODE)):
        out, expected = run(replace(case, layer=layer), in_pytorch)
        torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)


def test_sinks_are_refused(in_pytorch: AttentionBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(in_pytorch.limits, dtypes=None, head_dims=None)
    monkeypatch.setattr(in_pytorch, "limits", limits)
    with pytest.raises(ConfigError, match="has no attention sinks"):
        check_layers(in_pytorch, [Layer(sinks=torch.zeros(6))], torch.float16)


def test_softcap_is_refused_where_it_is_not_computed(
    in_pytorch: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(in_pytorch.limits, softcap=False, dtypes=None, head_dims=None)
    monkeypatch.setattr(in_pytorch, "limits", limits)
    check_layers(in_pytorch, [Layer()], torch.float16)
    with pytest.raises(ConfigError, match="does not cap attention scores"):
        check_layers(in_pytorch, [Layer(softcap=0.5)], torch.float16)


@pytest.mark.parametrize("kind", ["decode", "chain", "tree"])
def test_fixed_buffers_follow_what_they_are_planned_for(
    kind: str, in_pytorch: AttentionBackend
) -> None:
    """As a captured graph would read them."""
    short, long = graph_cases(kind, Layer(), torch.float32, CPU)
    batch, q = short.batch(in_pytorch), short.q()
    plan = in_pytorch.init_forward_metadata_capture(batch)
    in_pytorch.forward_extend(q, short.layer, batch)
    become(batch, long.batch(in_pytorch))
    in_pytorch.init_forward_metadata_replay(batch, plan)
    out = in_pytorch.forward_extend(long.q(), long.layer, batch)
    torch.testing.assert_close(out.double(), run(long, in_pytorch)[1], rtol=3e-6, atol=3e-6)


def graph_cases(
    kind: str, layer: Layer, dtype: torch.dtype, device: torch.device
) -> tuple[Case, Case]:
    """What is captured, and what is replayed."""
    mode = ForwardMode.DECODE if kind == "decode" else ForwardMode.TARGET_VERIFY
    count = 1 if kind == "decode" else 7
    form = Case([(0, count), (0, count)], mode, layer=layer, dtype=dtype, device=device)
    long = replace(form, lens=[(50, count), (19, count)], seed=5)
    if kind != "tree":
        return form, long
    star = [-1, 0, 0, 0, 0, 0, 0]
    return replace(form, trees=[BUSHY, BUSHY]), replace(long, trees=[star, BUSHY])


def become(batch: ForwardBatch, later: ForwardBatch) -> None:
    """Fill another batch into fixed buffers, and tell the host's lengths."""
    for name in ("seq_lens", "prefix_lens", "positions", "req_pool_indices"):
        getattr(batch, name).copy_(getattr(later, name))
    batch.prefix_lens_cpu = later.prefix_lens_cpu
    batch.req_to_token_pool.req_to_token.copy_(later.req_to_token_pool.req_to_token)
    kv, kv_later = (b.token_to_kv_pool.get_kv_buffer(0) for b in (batch, later))
    for ours, theirs in zip(kv, kv_later, strict=True):
        ours.copy_(theirs)
    if batch.tree is not None and later.tree is not None:
        batch.tree.mask_BNN.copy_(later.tree.mask_BNN)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.num_heads}x{layer.head_dim}")
def test_every_mode_on_a_gpu(layer: Layer, page_size: int) -> None:
    backend = make_attention_backend("flashinfer", CUDA)
    for case in every_mode():
        case = replace(case, layer=layer, dtype=torch.bfloat16, device=CUDA, page_size=page_size)
        out, expected = run(case, backend)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("lens", [[(0, 9), (13, 8)], [(3, 1), (0, 1), (50, 1)]])
def test_a_sliding_window_on_a_gpu(lens: list[tuple[int, int]]) -> None:
    case = Case(lens, layer=Layer(9, 3, 64, 0.125, 5), dtype=torch.bfloat16, device=CUDA)
    if all(count == 1 for _, count in lens):
        case.mode = ForwardMode.DECODE
    out, expected = run(case, make_attention_backend("flashinfer", CUDA))
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@needs_library
def test_several_plans_wait_for_their_forwards() -> None:
    backend = make_attention_backend("flashinfer", CUDA)
    cases = [replace(case, layer=LAYERS[0], dtype=torch.bfloat16) for case in every_mode()]
    cases = [replace(case, device=CUDA) for case in cases]
    batches = [case.batch(backend) for case in cases]
    for batch in batches:
        backend.init_forward_metadata(batch)
    for case, batch in zip(cases, batches, strict=True):
        forward = backend.forward_decode if case.mode.is_decode() else backend.forward_extend
        out = forward(case.q(), case.layer, batch)
        torch.testing.assert_close(out.double().cpu(), run(case, backend)[1], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("kind", ["decode", "chain", "tree"])
def test_a_replayed_graph_follows_what_it_is_planned_for(kind: str) -> None:
    short, long = graph_cases(kind, LAYERS[0], torch.bfloat16, CUDA)
    backend = make_attention_backend("flashinfer", CUDA)
    batch, q = short.batch(backend), short.q()
    plan = backend.init_forward_metadata_capture(batch)
    backend.forward_extend(q, short.layer, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward_extend(q, short.layer, batch)
    become(batch, long.batch(backend))
    q.copy_(long.q())
    backend.init_forward_metadata_replay(batch, plan)
    graph.replay()
    _, expected = run(long, backend)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-2, atol=2e-2)
