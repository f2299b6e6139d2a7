"""Builds an engine from a configuration."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch

from specengine.core.batch import AttentionBackend
from specengine.core.config import EngineConfig
from specengine.core.draft_context import DraftContext
from specengine.core.model import DecoderModel
from specengine.draft.loaded import LoadedDraft, kv_shape_of
from specengine.engine.adaptive.build import fixed_depth, make_adaptive
from specengine.engine.adaptive.cost_file import CostFile
from specengine.engine.cost_facts import apply_cost_file, engine_facts, keep_at_the_end
from specengine.engine.detokenizer import decoder_of
from specengine.engine.draft_build import load_draft, make_draft_runners
from specengine.engine.draft_depth import NodeLimit
from specengine.engine.factories import make_drafter, make_verifier, max_nodes
from specengine.engine.forward_graphs_build import add_draft_loops, add_ragged_graphs, graph_bytes
from specengine.engine.grammar.compiler import GrammarCompiler
from specengine.engine.loop import Engine
from specengine.engine.parts import EngineParts
from specengine.engine.phases import Phases
from specengine.engine.pipeline_build import make_pipeline
from specengine.engine.plan_ahead import make_plan_ahead
from specengine.engine.precompile import can_precompile, compile_ahead, precompile_calls
from specengine.engine.resolve import resolve, torch_dtype
from specengine.engine.round.build import HostRoundsError, make_rounds
from specengine.engine.spec_options import check_sizes, draft_slots
from specengine.engine.tracing.build import record_trace, traced_verifier
from specengine.kernels.compilations import tally
from specengine.layers.prefill_sampler import sample_prefill
from specengine.memory.allocator import TokenToKVPoolAllocator
from specengine.memory.kv_cache import KVShape, MHATokenToKVPool
from specengine.memory.radix_cache import RadixCache
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.runner.attention import make_attention_backend
from specengine.runner.attention.limits import check_trees
from specengine.runner.fallbacks import NoGraphs
from specengine.runner.loader.load import check_quantization, load_model, model_class_of
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.loader.source import resolve_model
from specengine.runner.loader.tokenizer import load_tokenizer
from specengine.runner.memory.device import DeviceMemory
from specengine.runner.memory.graph_memory import GraphMemory
from specengine.runner.memory.plan import MemoryPlan
from specengine.runner.memory.profile import peak_of_forward
from specengine.runner.model_runner import MemoryPools, ModelRunner
from specengine.runner.worker import TpModelWorker
from specengine.scheduler.ledger import KVLedger
from specengine.scheduler.policy import SchedulePolicy
from specengine.scheduler.scheduler import Scheduler
from specengine.target.registry import find_model_class

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Rows of logits in the forward that memory is measured with.
MAX_PROFILED_REQUESTS = 64


def load(config: EngineConfig, phases: Phases) -> LoadedModel:
    """Find, read and pack the model. Raises ConfigError or ModelLoadError."""
    with phases.phase("find model"):
        source = resolve_model(config.model)
        model_class_of(source, find_model_class)
        check_quantization(source, config.model.quantization)
        config = resolve(config, source.context_length, _checkpoint_dtype(source))
    with phases.phase("load tokenizer"):
        tokenizer = load_tokenizer(source, config.model.chat_template)
    with phases.phase("load weights"):
        model = load_model(
            source,
            find_model_class,
            torch_dtype(config.model.dtype),
            torch.device(config.model.device),
            config.model.quantization,
            config.model.random_seed,
            config.model.context_length,
            fp8_kv=config.model.kv_cache_dtype == "fp8",
        )
    return LoadedModel(source, config, cast(DecoderModel, model), tokenizer)


def build_engine(
    config: EngineConfig, loaded: LoadedModel | None = None, phases: Phases | None = None
) -> Engine:
    """The engine of a configuration. `loaded` lends the weights of an earlier one, whose model
    section must be the same; `phases` goes on counting. Raises ConfigError, ModelLoadError or
    OutOfMemoryError."""
    phases = phases or Phases()
    costs = CostFile.of(config.spec)
    loaded = loaded or load(config, phases)
    config = resolve(config, loaded.source.context_length, _checkpoint_dtype(loaded.source))
    draft = load_draft(config, loaded, phases)
    with phases.phase("allocate memory"):
        backend = make_attention_backend(config.model.attention_backend, loaded.device)
        memory = _allocate(config, loaded, draft, backend)
    pools = MemoryPools(memory.rows, memory.kv)
    graphs = GraphMemory(memory.graph_budget)
    runner = ModelRunner(loaded.model, loaded.device, pools, backend, draft.capture_layers, graphs)
    draft_runners = make_draft_runners(draft, runner, memory.draft_kv)
    for one in (runner, *draft_runners):
        one.guards_graphs = config.graph.debug_cuda_graph
        if config.graph.enable_torch_compile and not config.graph.disable_cuda_graph:
            one.compile_max_bs = config.graph.torch_compile_max_bs
    if costs is not None:
        costs.facts = engine_facts(config, loaded, draft, backend.name)
    engine = _assemble(config, loaded, TpModelWorker(runner), draft_runners, memory, costs)
    engine.ragged_counters = add_ragged_graphs(config, runner, draft_runners)
    text_depends_on_drafts = getattr(engine.parts.verifier, "text_depends_on_drafts", False)
    engine.ragged_counters |= add_draft_loops(config, engine.drafter, text_depends_on_drafts)
    _capture(config, engine, runner, phases, costs)
    keep_at_the_end(costs, engine)
    engine.host_round.plan_ahead = make_plan_ahead(config, runner, engine.drafter)
    record_trace(engine, loaded)
    graphs.log()
    logger.info("ready after %.1f s", phases.total)
    return engine


def _capture(
    config: EngineConfig,
    engine: Engine,
    runner: ModelRunner,
    phases: Phases,
    costs: CostFile | None,
) -> None:
    """All graphs that are made at start."""
    sizes = None if config.graph.disable_cuda_graph else config.graph.cuda_graph_bs
    if sizes is None:
        apply_cost_file(costs, engine, None)
        return
    gc.collect()  # once for all captures: what engines that are gone have left is free for graphs
    parts = engine.parts
    chooses, rounds = parts.adaptive is not None, None
    try:
        rounds = make_rounds(config, runner, parts.drafter, parts.verifier, chooses)
    except HostRoundsError as error:
        engine.no_rounds = NoGraphs("round", str(error))
    apply_cost_file(costs, engine, rounds)
    with phases.phase("compile kernels"):
        compile_ahead(config, runner, rounds)
    with tally() as compiled:
        with phases.phase("capture graphs"):
            runner.capture_graphs(list(sizes), not config.graph.disable_cuda_graph_padding)
        if rounds is not None:
            with phases.phase("capture rounds"):
                engine.pipeline = make_pipeline(config, parts, rounds, costs)
    if compiled.kernels:
        logger.info("compiled %d more kernels while capturing", compiled.kernels)


@dataclass(frozen=True)
class Memory:
    """The KV memory of one engine, and the page table."""

    rows: ReqToTokenPool
    kv: MHATokenToKVPool
    draft_kv: MHATokenToKVPool  # the same slots
    num_slots: int
    graph_budget: int


def _allocate(
    config: EngineConfig, loaded: LoadedModel, draft: LoadedDraft, backend: AttentionBackend
) -> Memory:
    plan = _plan_memory(config, loaded, draft, backend)
    # The first page belongs to no request: padding rows of graphs write there.
    num_slots = plan.num_tokens + config.memory.page_size
    rows = _require(config.schedule.max_running_requests)
    return Memory(
        rows=ReqToTokenPool(rows, _require(config.model.context_length), loaded.device),
        kv=MHATokenToKVPool(num_slots, _kv_shape(loaded), loaded.device),
        draft_kv=MHATokenToKVPool(num_slots, draft.kv_shape, loaded.device),
        num_slots=num_slots,
        graph_budget=plan.graph_budget,
    )


def _make_scheduler(config: EngineConfig, loaded: LoadedModel, memory: Memory) -> Scheduler:
    context, page_size = _require(config.model.context_length), config.memory.page_size
    ledger = KVLedger(
        memory.rows,
        TokenToKVPoolAllocator(memory.num_slots, page_size),
        RadixCache(page_size, config.memory.disable_radix_cache),
    )
    policy = SchedulePolicy(
        context_len=context,
        max_running_requests=_require(config.schedule.max_running_requests),
        chunked_prefill_size=_require(config.schedule.chunked_prefill_size),
        max_nodes=max_nodes(config.spec),
        draft_slots=draft_slots(config.spec),
        enable_mixed_chunk=config.schedule.enable_mixed_chunk,
    )

    make_decoder = partial(decoder_of, loaded.tokenizer)
    return Scheduler(policy, ledger, loaded.model.vocab_size, loaded.device, make_decoder)


def _make_grammars(loaded: LoadedModel) -> GrammarCompiler:
    ends = loaded.source.eos_token_ids
    return GrammarCompiler(loaded.tokenizer, loaded.model.vocab_size, ends)


def _assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    worker: TpModelWorker,
    draft_runners: Sequence[ModelRunner],
    memory: Memory,
    costs: CostFile | None,
) -> Engine:
    scheduler = _make_scheduler(config, loaded, memory)
    num_rows = memory.rows.req_to_token.shape[0]
    limit = NodeLimit(scheduler.round_limit)
    drafter = make_drafter(
        DraftContext(config.spec, limit, draft_runners, num_rows, worker.runner.device)
    )
    check_sizes(config.spec, drafter)
    verifier = make_verifier(config.spec, drafter)
    if verifier.text_depends_on_drafts:  # else no text depends on the state of the drafter
        scheduler.ledger.cache.lookahead = drafter.kv_lookahead
    by_hand = None if costs is None else costs.by_hand
    if drafter.proposes_tree:
        check_trees(worker.runner.attn_backend, worker.runner.attn_layers)
    return Engine(
        EngineParts(
            config=config,
            model_name=(*config.model.served_names, loaded.source.name)[0],
            tokenizer=loaded.tokenizer,
            eos_ids=loaded.source.eos_token_ids,
            vocab_size=loaded.model.vocab_size,
            context_length=_require(config.model.context_length),
            worker=worker,
            scheduler=scheduler,
            drafter=drafter,
            verifier=traced_verifier(config.trace, verifier),
            sample_prefill=sample_prefill,
            grammars=_make_grammars(loaded),
            fixed_depth=fixed_depth(config, drafter, verifier),
            adaptive=make_adaptive(config, drafter, verifier, limit, by_hand),
            pooling=loaded.source.pooling,
        )
    )


def _checkpoint_dtype(source: ModelSource) -> str | None:
    dtype = getattr(source.hf_config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _kv_shape(loaded: LoadedModel) -> KVShape:
    model = loaded.config.model
    is_fp8 = model.kv_cache_dtype == "fp8"
    dtype = torch.float8_e4m3fn if is_fp8 else torch_dtype(model.dtype)
    return kv_shape_of(loaded.source.hf_config, loaded.model.num_layers, dtype)


def _plan_memory(
    config: EngineConfig, loaded: LoadedModel, draft: LoadedDraft, backend: AttentionBackend
) -> MemoryPlan:
    memory, schedule = DeviceMemory(loaded.device), config.schedule
    shape = _kv_shape(loaded)
    context, rows = _require(config.model.context_length), _require(schedule.max_running_requests)
    limit = config.memory.max_total_tokens or rows * context
    current = peak = memory.current()
    graphs = 0
    if memory.is_cuda:
        chunk = _require(schedule.chunked_prefill_size)
        tokens = chunk if chunk > 0 else context
        requests = min(rows, tokens, MAX_PROFILED_REQUESTS)
        tokens = min(tokens, requests * context)  # no position past the rotary table
        measure = partial(_peak, loaded, draft, backend, tokens, requests)
        if can_precompile(config, backend):
            precompile_calls([measure])
        needed = measure()
        peak += needed
        graphs = graph_bytes(config, loaded.model, needed // tokens)
    plan = MemoryPlan(
        total=memory.total(),
        fraction=_require(config.memory.mem_fraction_static),
        used=memory.used(),
        peak=peak,
        current=current,
        bytes_per_token=shape.bytes_per_token + draft.kv_shape.bytes_per_token,
        limit_tokens=limit,
        page_size=config.memory.page_size,
        graphs=graphs,
    )
    page_size = config.memory.page_size
    plan.check(min(context, limit // page_size * page_size))
    plan.log()
    return plan


def _peak(
    loaded: LoadedModel, draft: LoadedDraft, backend: AttentionBackend, tokens: int, requests: int
) -> int:
    """Bytes that a forward of this size needs, of the target or of a drafter's model."""
    size, layers = (tokens, requests, loaded.device), draft.capture_layers
    needed = [peak_of_forward(loaded.model, backend, _kv_shape(loaded), *size, layers)]
    for model in draft.models:
        width = draft.feature_size
        needed.append(peak_of_forward(model, backend, draft.kv_shape, *size, feature_size=width))
    return max(needed)


def _require(value: T | None) -> T:
    """A field that `resolve` has filled."""
    assert value is not None
    return value
