"""The PyTorch backend against dense attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from specengine.core.batch import ForwardMode
from specengine.core.errors import ConfigError
from specengine.core.registry import ATTENTION_BACKENDS
from specengine.kernels.native.library import library
from specengine.runner.attention import make_attention_backend, torch_native
from specengine.runner.attention.limits import check_graphs
from specengine.runner.attention.torch_backend import TorchAttentionBackend
from specengine.runner.attention.torch_native import NativeDecode
from specengine.runner.attention.torch_padded import PaddedAttention, plan_padded
from specengine.runner.attention.torch_spans import SpanAttention, plan_spans
from tests.runner.attention_cases import (
    BUSHY,
    FORK,
    ROOT_ALONE,
    Case,
    Layer,
    dense_attention,
    every_mode,
)


def check(case: Case, tolerance: float = 2e-6) -> None:
    """Both ways of running a batch, and the one that the backend picks, give dense attention."""
    backend = TorchAttentionBackend()
    batch, q = case.batch(backend), case.q()
    expected = dense_attention(case, batch, q)
    k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(0)
    ways: list[SpanAttention | PaddedAttention] = [plan_spans(batch)]
    if all(extend for _, extend in case.lens):
        ways.append(plan_padded(batch))
    for way in ways:
        out = way.forward(q, case.layer, k_cache, v_cache)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if case.mode.is_decode() else backend.forward_extend
    out = forward(q, case.layer, batch)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("prefixes", [[0], [17], [3, 0, 30, 12]])
def test_decode(prefixes: list[int], window: int | None, scattered: bool) -> None:
    lens = [(prefix, 1) for prefix in prefixes]
    check(Case(lens, ForwardMode.DECODE, scattered=scattered, layer=Layer(sliding_window=window)))


@pytest.mark.parametrize("window", [None, 6])
def test_chunk_behind_a_prefix_runs_in_fused_attention(window: int | None) -> None:
    """PyTorch refuses it where the mask does not have the dimensions that it asks for."""
    case = Case([(20, 30), (9, 3)], ForwardMode.EXTEND, layer=Layer(sliding_window=window))
    backend = TorchAttentionBackend()
    batch, q = case.batch(backend), case.q()
    k_cache, v_cache = batch.token_to_kv_pool.get_kv_buffer(0)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        plan_spans(batch).forward(q, case.layer, k_cache, v_cache)


@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("lens", [[(0, 9)], [(13, 8)], [(0, 5), (20, 3), (7, 11), (30, 1)]])
def test_extend(lens: list[tuple[int, int]], window: int | None, scattered: bool) -> None:
    check(Case(lens, scattered=scattered, layer=Layer(sliding_window=window)))


@pytest.mark.parametrize("window", [None, 6])
def test_sinks(window: int | None) -> None:
    """In every way: instead of C for decode, padded, request by request, causal, under a tree."""
    layer = Layer(sliding_window=window, sinks=torch.linspace(-2.0, 3.0, 6))
    for lens in ([(17, 1)], [(3, 1), (0, 1), (30, 1)]):
        check(Case(lens, ForwardMode.DECODE, layer=layer))
    for lens in ([(0, 9)], [(13, 8)], [(0, 5), (20, 3), (7, 11), (30, 1)]):
        check(Case(lens, layer=layer))
    trees = [BUSHY, FORK]
    check(Case([(11, 7), (0, 4)], ForwardMode.TARGET_VERIFY, trees=trees, layer=layer))


@pytest.mark.parametrize("window", [None, 6])
def test_softcap(window: int | None) -> None:
    """In every way: C for decode, padded, request by request, causal and under a tree."""
    layer = Layer(sliding_window=window, softcap=0.5)
    for lens in ([(17, 1)], [(3, 1), (0, 1), (30, 1)]):
        check(Case(lens, ForwardMode.DECODE, layer=layer))
    for lens in ([(0, 9)], [(13, 8)], [(0, 5), (20, 3), (7, 11), (30, 1)]):
        check(Case(lens, layer=layer))
    trees = [BUSHY, FORK]
    check(Case([(11, 7), (0, 4)], ForwardMode.TARGET_VERIFY, trees=trees, layer=layer))


def test_decode_takes_q_as_part_of_a_wider_tensor() -> None:
    """As a layer without rotation has it."""
    case, backend = Case([(3, 1), (9, 1), (2, 1)], ForwardMode.DECODE), TorchAttentionBackend()
    batch, q = case.batch(backend), case.q()
    backend.init_forward_metadata(batch)
    wide = torch.cat((q, torch.full_like(q, torch.nan)), 1)[:, : q.shape[1]]
    assert not wide.is_contiguous()
    found = backend.forward_decode(wide, case.layer, batch)
    assert torch.equal(found, backend.forward_decode(q, case.layer, batch))


def test_a_request_without_new_tokens_has_no_rows() -> None:
    check(Case([(4, 2), (9, 0), (3, 3)]))


@pytest.mark.parametrize("window", [None, 2, 4])
def test_trees(window: int | None) -> None:
    lens = [(11, 7), (0, 4), (25, 1)]
    trees = [BUSHY, FORK, ROOT_ALONE]
    layer = Layer(sliding_window=window)
    check(Case(lens, ForwardMode.TARGET_VERIFY, trees=trees, layer=layer))
    check(Case(lens[:1], ForwardMode.TARGET_VERIFY, trees=trees[:1], layer=layer))


@pytest.mark.parametrize("chunk", [1, 4, 9, 64])
def test_chunks(chunk: int) -> None:
    """In every way: C for decode, padded, request by request, causal and under a tree; borders
    before, amid and behind the new tokens, and between the levels of a tree."""
    layer = Layer(attention_chunk=chunk)
    for lens in ([(17, 1)], [(8, 1)], [(3, 1), (0, 1), (8, 1), (9, 1), (30, 1)]):
        check(Case(lens, ForwardMode.DECODE, layer=layer))
    for lens in ([(0, 9)], [(13, 8)], [(0, 5), (20, 3), (7, 11), (30, 1)]):
        check(Case(lens, layer=layer))
    for lens in ([(7, 7), (0, 4), (26, 1)], [(7, 7)]):
        trees = [BUSHY, FORK, ROOT_ALONE][: len(lens)]
        check(Case(lens, ForwardMode.TARGET_VERIFY, trees=trees, layer=layer))


@given(data=st.data())
@settings(max_examples=30)
def test_any_tree(data: st.DataObject) -> None:
    """Some of whose first nodes may be there already."""
    trees, past = [], data.draw(st.integers(0, 5))
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(past + 1, past + 8))
        trees.append([-1] + [data.draw(st.integers(0, node - 1)) for node in range(1, size)])
    lens = [(past + data.draw(st.integers(0, 20)), len(parents) - past) for parents in trees]
    window = data.draw(st.none() | st.integers(1, 12))
    layer = Layer(num_heads=2, num_kv_heads=1, head_dim=8, sliding_window=window)
    check(Case(lens, ForwardMode.TARGET_VERIFY, trees=trees, num_past=past, layer=layer))


@pytest.mark.parametrize("window", [None, 4])
def test_a_tree_that_grows_by_a_level(window: int | None) -> None:
    """The last two of BUSHY are run on the five that are there; FORK's last on three."""
    layer, mode = Layer(sliding_window=window), ForwardMode.DRAFT_EXTEND
    check(Case([(16, 2), (9, 2)], mode, trees=[BUSHY, BUSHY], num_past=5, layer=layer))
    check(Case([(3, 1), (20, 1)], mode, trees=[FORK, FORK], num_past=3, layer=layer))


def test_a_chain_is_a_tree_without_branches() -> None:
    lens, parents = [(9, 5)], [-1, 0, 1, 2, 3]
    plain = Case(lens, ForwardMode.TARGET_VERIFY)
    as_tree = Case(lens, ForwardMode.TARGET_VERIFY, trees=[parents])
    torch.testing.assert_close(run(plain), run(as_tree), rtol=1e-6, atol=1e-6)


def run(case: Case) -> torch.Tensor:
    backend = TorchAttentionBackend()
    batch = case.batch(backend)
    backend.init_forward_metadata(batch)
    return backend.forward_extend(case.q(), case.layer, batch)


@pytest.mark.parametrize("case", every_mode())
def test_values_that_are_a_part_of_keys(case: Case) -> None:
    case.layer = Layer(num_heads=4, num_kv_heads=1, head_dim=24, value_dim=16)
    check(case)


@pytest.mark.parametrize("layer", [Layer(4, 4), Layer(8, 1), Layer(3, 3, 24)])
def test_head_shapes(layer: Layer) -> None:
    check(Case([(5, 4), (2, 1)], layer=layer))
    check(Case([(5, 1), (2, 1)], ForwardMode.DECODE, layer=layer))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_softmax_is_float32(dtype: torch.dtype) -> None:
    tolerance = 2e-3 if dtype is torch.float16 else 1.6e-2
    check(Case([(30, 6), (12, 1)], dtype=dtype), tolerance)


def test_few_keys_go_to_the_compiled_form(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TorchAttentionBackend()
    batch = Case([(20, 1), (30, 1)], ForwardMode.DECODE).batch(backend)
    for most, is_native in ((51, library() is not None), (50, False)):
        monkeypatch.setattr(torch_native, "_MAX_KEYS", most)
        plan = backend.init_forward_metadata(batch).metadata
        assert isinstance(plan, NativeDecode) == is_native


def test_very_uneven_batches_run_request_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native, "_MAX_KEYS", 0)
    backend = TorchAttentionBackend()
    even = Case([(20, 1), (30, 1)], ForwardMode.DECODE).batch(backend)
    assert isinstance(backend.init_forward_metadata(even).metadata, PaddedAttention)
    uneven = Case([(20, 1), (30, 1)], ForwardMode.DECODE).batch(backend)
    uneven.prefix_lens_cpu = [20, 600]
    uneven.req_to_token_pool.req_to_token = torch.ones(3, 700, dtype=torch.int32)
    assert isinstance(backend.init_forward_metadata(uneven).metadata, SpanAttention)


def test_graphs_are_refused_with_the_flag_that_helps() -> None:
    with pytest.raises(ConfigError, match="--disable-cuda-graph"):
        check_graphs(TorchAttentionBackend())


def test_each_registered_backend_is_compared_in_a_file_of_its_own() -> None:
    folder = Path(__file__).parent
    texts = {n: folder / f"test_attention_{n}.py" for n in ATTENTION_BACKENDS}
    assert [n for n, one in texts.items() if "attention_cases" not in one.read_text()] == []


def test_backend_by_name(caplog: pytest.LogCaptureFixture) -> None:
    cpu = torch.device("cpu")
    with caplog.at_level("INFO"):
        assert make_attention_backend("auto", cpu).name == "torch"
    assert "attention backend: torch (device cpu)" in caplog.text
    with pytest.raises(ConfigError, match="'flash' is unknown"):
        make_attention_backend("flash", cpu)
