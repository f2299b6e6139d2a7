"""The FlashAttention backend against dense attention: on any machine with FlashAttention's function
written in PyTorch, and on a GPU with the kernels of whichever library is installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specengine.core.batch import AttentionBackend, ForwardMode
from specengine.core.errors import ConfigError
from specengine.kernels.attention import flash_attention, flash_attention_ref
from specengine.kernels.attention.types import FlashAttention
from specengine.runner.attention import make_attention_backend
from specengine.runner.attention.flash_backend import FlashAttentionBackend
from specengine.runner.attention.limits import check_layers, check_trees
from tests.runner.attention_cases import (
    BUSHY,
    MAX_CONTEXT,
    Case,
    Layer,
    dense_attention,
    every_mode,
    overwrite,
    run,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_library = pytest.mark.skipif(
    not (torch.cuda.is_available() and flash_attention.is_installed()),
    reason="no CUDA device, or neither sglang-kernel nor vllm is installed",
)
LAYERS = [Layer(9, 3, 64, 0.125), Layer(8, 2, 128, 0.09), Layer(4, 4, 64, 0.125)]


def in_pytorch() -> AttentionBackend:
    return FlashAttentionBackend(flash_attention_ref.flash_attention)


@pytest.mark.parametrize("case", every_mode(), ids=lambda case: case.mode.name)
def test_every_mode_with_the_function_in_pytorch(case: Case) -> None:
    out, expected = run(case, in_pytorch())
    torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("num_past", [0, 1])
def test_masks_are_not_read_past_the_nodes_of_a_request(num_past: int) -> None:
    """Buffers of graphs have there what the batch before had: of blocks whose nodes all see each
    other, ones."""
    lens = [(11, 7 - num_past), (3, 4 - num_past), (25, 1)]
    trees = [BUSHY, [-1, 0, 1, 1], [-1, *[0] * num_past]]
    case, backend = Case(lens, ForwardMode.DRAFT_EXTEND, trees, num_past), in_pytorch()
    batch, q = case.batch(backend), case.q()
    assert batch.tree is not None
    for request, count in enumerate(map(len, trees)):
        batch.tree.mask_BNN[request, :, count:] = True
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(q, case.layer, batch)
    expected = dense_attention(case, case.batch(backend), q)
    torch.testing.assert_close(out.double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_sliding_window_over_chains(window: int) -> None:
    for lens in ([(0, 9), (13, 8)], [(3, 1), (0, 1), (50, 1)]):
        out, expected = run(Case(lens, layer=Layer(sliding_window=window)), in_pytorch())
        torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)


def test_sinks() -> None:
    layer = Layer(sinks=torch.linspace(-2.0, 3.0, 6))
    lens = [(11, 7), (0, 4)]
    for case in (Case(lens), Case(lens, ForwardMode.TARGET_VERIFY, trees=[BUSHY, [-1, 0, 1, 1]])):
        out, expected = run(replace(case, layer=layer), in_pytorch())
        torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lens", "trees", "window"),
    [
        ([(11, 7), (0, 4)], None, None),
        ([(11, 7), (0, 4)], None, 5),
        ([(50, 1)], None, None),
        ([(50, 1)], None, 5),
        ([(11, 7), (0, 4)], [BUSHY, [-1, 0, 1, 1]], None),
    ],
    ids=["chunks", "chunks in a window", "decode", "decode in a window", "tree"],
)
def test_sinks_on_a_gpu(
    lens: list[tuple[int, int]],
    trees: list[list[int]] | None,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    sinks = torch.linspace(-2.0, 6.0, 16, dtype=dtype)
    layer = Layer(16, 2, 64, 0.125, sliding_window=window, sinks=sinks.to(CUDA))
    mode = ForwardMode.TARGET_VERIFY if trees else ForwardMode.EXTEND
    case = Case(lens, mode, trees=trees, layer=layer, dtype=dtype, device=CUDA)
    out, expected = run(case, make_attention_backend("fa", CUDA))
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_softcap() -> None:
    layer = Layer(softcap=0.5)
    lens = [(11, 7), (0, 4)]
    for case in (Case(lens), Case(lens, ForwardMode.TARGET_VERIFY, trees=[BUSHY, [-1, 0, 1, 1]])):
        out, expected = run(replace(case, layer=layer), in_pytorch())
        torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.num_heads}x{layer.head_dim}")
def test_every_mode_on_a_gpu(layer: Layer, dtype: torch.dtype, page_size: int) -> None:
    backend = make_attention_backend("fa", CUDA)
    tolerance = 3e-3 if dtype is torch.float16 else 2e-2
    for case in every_mode():
        case = replace(case, layer=layer, dtype=dtype, device=CUDA, page_size=page_size)
        out, expected = run(case, backend)
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("lens", [[(0, 9), (13, 8)], [(3, 1), (0, 1), (50, 1)]])
def test_a_sliding_window_on_a_gpu(lens: list[tuple[int, int]]) -> None:
    layer = Layer(9, 3, 64, 0.125, sliding_window=5)
    case = Case(lens, layer=layer, dtype=torch.bfloat16, device=CUDA)
    out, expected = run(case, make_attention_backend("fa", CUDA))
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@needs_library
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
@pytest.mark.parametrize("in_tree", [False, True])
def test_a_replayed_graph_follows_lengths_rows_and_trees(mode: ForwardMode, in_tree: bool) -> None:
    """Captured on one batch; replayed after lengths, page table, q and mask changed in place."""
    if in_tree and mode.is_decode():
        pytest.skip("decode steps have no tree")
    count = 1 if mode.is_decode() else 7
    star = [-1, 0, 0, 0, 0, 0, 0]
    form = Case([(0, count), (0, count)], mode, layer=LAYERS[0], dtype=torch.bfloat16, device=CUDA)
    short = replace(form, trees=[BUSHY, BUSHY] if in_tree else None)
    long = replace(form, lens=[(50, count), (19, count)], seed=5)
    long = replace(long, trees=[star, BUSHY] if in_tree else None)
    backend = make_attention_backend("fa", CUDA)
    batch, q = short.batch(backend), short.q()
    plan = backend.init_forward_metadata_capture(batch)
    assert plan.metadata.max_keys == MAX_CONTEXT
    backend.forward_extend(q, short.layer, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward_extend(q, short.layer, batch)

    later = long.batch(backend)
    overwrite(batch, later)
    q.copy_(long.q())
    backend.init_forward_metadata_replay(batch, plan)
    graph.replay()
    _, expected = run(long, backend)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-2, atol=2e-2)


def test_what_it_cannot_serve_is_refused_by_name() -> None:
    backend, layer = in_pytorch(), Layer(9, 3, 64, 0.125)
    check_layers(backend, [layer], torch.bfloat16)
    with pytest.raises(ConfigError, match="fa does not compute in float32; use --dtype bfloat16"):
        check_layers(backend, [layer], torch.float32)
    with pytest.raises(ConfigError, match="heads of 12"):
        check_layers(backend, [replace(layer, head_dim=12)], torch.bfloat16)
    with pytest.raises(ConfigError, match="does not attend within chunks"):
        check_layers(backend, [replace(layer, attention_chunk=8)], torch.bfloat16)
    check_trees(backend, [layer])
    with pytest.raises(ConfigError, match="no sliding window under draft trees; draft chains"):
        check_trees(backend, [layer, replace(layer, sliding_window=8)])


def test_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"sglang-kernel is not installed.*specengine\[cuda\]"):
        make_attention_backend("fa", CUDA)
    monkeypatch.setattr(flash_attention, "is_installed", lambda: True)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        make_attention_backend("fa", CPU)


def test_a_library_of_another_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> FlashAttention:
        raise ImportError("sglang-kernel: undefined symbol")

    monkeypatch.setattr(flash_attention, "is_installed", lambda: True)
    monkeypatch.setattr(flash_attention, "load", load)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(sglang-kernel: undefined symbol\)"):
        make_attention_backend("fa", CUDA)
