"""Turns every "auto" and None of a configuration into a value, once, before anything is built."""

from __future__ import annotations

from dataclasses import replace

import torch

from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError
from specengine.core.graph_config import GraphConfig
from specengine.core.platform import best_device, platform_of
from specengine.core.registry import DEFAULT_SPLITTING_OPS, LOAD_QUANTIZATIONS
from specengine.engine.spec_options import resolve_spec
from specengine.kernels.dispatch import multiprocessors
from specengine.runner.attention import runs_in_graphs

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(name: str) -> torch.device:
    """Raises ConfigError where a kind of device is asked for and absent."""
    if name == "auto":
        return best_device()
    device = torch.device(name)
    if not platform_of(device).is_available():
        raise ConfigError(
            f"--device {name}: PyTorch sees no {name.upper()} device here; use --device cpu"
        )
    return device


def torch_dtype(name: str) -> torch.dtype:
    return _DTYPES[name]


def resolve(
    config: EngineConfig,
    model_context: int,
    model_dtype: str | None,
    keeps_state: bool = False,
    longest_context: int | None = None,
) -> EngineConfig:
    """Fill in the defaults that depend on the machine and the model.

    model_context: positions the model was made for. model_dtype: what its checkpoint says.
    keeps_state: it has recurrent state, so that no whole graph holds its prompts. longest_context:
    positions to which its rotary table may be stretched; None: model_context.
    """
    device = resolve_device(config.model.device)
    platform = platform_of(device)
    on_gpu = platform.is_accelerator
    _check_quantization(config, on_gpu)
    context = _context_length(config, model_context, longest_context or model_context)
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = _auto_dtype(on_gpu, config.model.quantization, model_dtype)
    rows = config.schedule.max_running_requests or (256 if on_gpu else 32)
    chunk = config.schedule.chunked_prefill_size or (_chunk(device) if on_gpu else 512)
    _check_split_sizes(config.split.pdmux_min_tokens, chunk)
    backend = config.model.decode_attention_backend or config.model.attention_backend
    chosen = backend if backend != "auto" else platform.attention_backend or "auto"
    of_drafts = config.model.draft_attention_backend or chosen
    has_graphs = platform.has_graphs and runs_in_graphs(chosen) and runs_in_graphs(of_drafts)
    sizes = _graph_sizes(config.graph, rows, has_graphs)
    if sizes is None and config.graph.cuda_graph_profile is not None:
        raise ConfigError(
            "--cuda-graph-profile shows graphs of whole forwards, and there are none "
            f"(device {device.type}, attention backend {chosen}, --cuda-graph-mode "
            f"{config.graph.cuda_graph_mode}): leave it out"
        )
    # Engines that share experts would capture all sizes of pieces at start.
    wants_pieces = keeps_state and not config.parallel.enable_dp_attention
    fraction = config.memory.mem_fraction_static or (0.88 if on_gpu else 0.25)
    return replace(
        config,
        model=replace(config.model, device=device.type, dtype=dtype, context_length=context),
        memory=replace(config.memory, mem_fraction_static=fraction),
        schedule=replace(config.schedule, max_running_requests=rows, chunked_prefill_size=chunk),
        graph=_resolve_graphs(config.graph, sizes, chunk, context, wants_pieces),
        spec=resolve_spec(config.spec),
    )


def _context_length(config: EngineConfig, model_context: int, longest: int) -> int:
    context = config.model.context_length or model_context
    if context > longest:
        raise ConfigError(
            f"--context-length {context} exceeds the {longest} positions of the model; lower it, "
            "or configure rotary scaling in the model's config.json"
        )
    return context


def _chunk(device: torch.device) -> int:
    """Prompt tokens of which products fill the device evenly: its multiprocessors take tiles of 128
    rows and 256 columns, and widths of products are mostly multiples of 512. Near 8192."""
    rows = 64 * multiprocessors(device)
    return rows * max(1, round(8192 / rows))


def _check_split_sizes(least: int | None, chunk: int) -> None:
    if least is not None and 0 < chunk < least:
        raise ConfigError(
            f"--pdmux-min-tokens {least}: no forward has more prompt tokens than "
            f"--chunked-prefill-size {chunk}, so that none would be split; lower the first"
        )


def _check_quantization(config: EngineConfig, on_gpu: bool) -> None:
    quantization, dtype = config.model.quantization, config.model.dtype
    if quantization is None or quantization in LOAD_QUANTIZATIONS:
        return
    if on_gpu:
        raise ConfigError(f"--quantization {quantization} has CPU kernels only; use --device cpu")
    if dtype not in ("auto", "bfloat16"):
        raise ConfigError(f"--quantization {quantization} computes in bfloat16, not in {dtype}")


def _auto_dtype(on_gpu: bool, quantization: str | None, model_dtype: str | None) -> str:
    """bfloat16 has no fast arithmetic on most CPUs; int8 and int4 kernels want it all the same."""
    if not on_gpu:
        is_packed = quantization is not None and quantization not in LOAD_QUANTIZATIONS
        return "bfloat16" if is_packed else "float32"
    return model_dtype if model_dtype in _DTYPES else "bfloat16"


def _resolve_graphs(
    graph: GraphConfig, sizes: tuple[int, ...] | None, chunk: int, context: int, wants_pieces: bool
) -> GraphConfig:
    """sizes: batch sizes of whole graphs, None without any. wants_pieces: if the mode is auto."""
    mode = graph.cuda_graph_mode
    if mode == "auto":
        mode = "full-and-piecewise" if wants_pieces and sizes else "full"
    graph = replace(graph, cuda_graph_mode=mode)
    tokens = graph.piecewise_cuda_graph_tokens
    if sizes is None:
        mode = "piecewise" if graph.has_pieces else "none"
    ops = graph.piecewise_splitting_ops
    if graph.has_pieces:
        ops = ops or DEFAULT_SPLITTING_OPS
        tokens = tokens or piecewise_sizes(context if chunk == -1 else chunk)
    return replace(
        graph,
        disable_cuda_graph=sizes is None,
        cuda_graph_bs=sizes,
        cuda_graph_mode=mode,
        piecewise_cuda_graph_tokens=tokens,
        piecewise_splitting_ops=ops,
    )


_LONGEST_PIECES = 2048  # tokens; longer forwards take the device longer than their launches


def piecewise_sizes(chunk: int) -> tuple[int, ...]:
    """Ascending; padding is at most an eighth of a forward of more than 128 tokens. chunk: prompt
    tokens of one forward at most, beside which requests that decode may have some more."""
    few, many = [1, 2, 4, 8, *range(16, 129, 16)], [*range(160, 257, 32), *range(320, 1025, 64)]
    sizes = [*few, *many, *range(1152, _LONGEST_PIECES + 1, 128)]
    most = next((size for size in sizes if size >= chunk * 9 // 8), _LONGEST_PIECES)
    return tuple(size for size in sizes if size <= most)


def _graph_sizes(graph: GraphConfig, rows: int, has_graphs: bool) -> tuple[int, ...] | None:
    if graph.disable_cuda_graph or not has_graphs or graph.cuda_graph_mode in ("none", "piecewise"):
        return None
    if graph.cuda_graph_bs is not None:
        # No batch is larger; recurrent state has no room for more, either (StatePool).
        return tuple(sorted({min(size, rows) for size in graph.cuda_graph_bs}))
    largest = min(graph.cuda_graph_max_bs or 256, rows)
    sizes = [1, 2, 3, 4, 6, 8, 12, *range(16, 64, 8), *range(64, 257, 32)]
    sizes += range(288, largest + 1, 64)
    return (*(size for size in sizes if size < largest), largest)
