"""Builds an engine from a configuration."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from specengine.core.batch import AttentionBackend
from specengine.core.config import EngineConfig
from specengine.core.draft_context import DraftContext
from specengine.core.errors import ConfigError
from specengine.core.graph_config import GraphConfig
from specengine.core.model import DecoderModel
from specengine.core.parallel import Link, NoLink
from specengine.core.platform import platform_of
from specengine.core.region import in_region
from specengine.core.sharing import ExpertSharers, evenly
from specengine.engine.adaptive.build import fixed_depth, make_adaptive
from specengine.engine.adaptive.cost_file import CostFile
from specengine.engine.cost_facts import apply_cost_file, engine_facts, keep_at_the_end
from specengine.engine.detokenizer import decoder_of
from specengine.engine.draft_build import load_draft, make_draft_runners
from specengine.engine.draft_depth import NodeLimit
from specengine.engine.factories import make_drafter, make_verifier, max_nodes
from specengine.engine.forward_graphs_build import add_draft_loops, add_ragged_graphs
from specengine.engine.grammar.compiler import GrammarCompiler
from specengine.engine.graph_profile import profile_graphs
from specengine.engine.loop import Engine
from specengine.engine.memory_build import Memory, allocate, required, snapshots_of
from specengine.engine.new_weights import RunningWeights
from specengine.engine.parallel.ranks import start_ranks
from specengine.engine.parts import EngineParts
from specengine.engine.phases import Phases
from specengine.engine.piecewise_build import add_pieces
from specengine.engine.pipeline_build import make_pipeline
from specengine.engine.plan_ahead import make_plan_ahead
from specengine.engine.precompile import compile_ahead
from specengine.engine.resolve import resolve, resolve_device
from specengine.engine.round.build import HostRoundsError, make_rounds
from specengine.engine.sharing import (
    Meeting,
    check_sharers,
    meet,
    share_experts,
    share_rounds,
)
from specengine.engine.sleep import make_sleeper
from specengine.engine.spec_options import check_sizes, draft_slots
from specengine.engine.split_build import (
    add_split_prefills,
    check_has_rounds,
    check_split,
    join_pipeline,
    use_lanes,
)
from specengine.engine.target_build import load_target
from specengine.engine.tracing.build import record_trace, traced_verifier
from specengine.kernels.compilations import tally
from specengine.layers.prefill_sampler import sample_prefill
from specengine.memory.allocator import TokenToKVPoolAllocator
from specengine.memory.radix_cache import RadixCache
from specengine.runner.attention import make_attention_backends
from specengine.runner.attention.limits import check_trees
from specengine.runner.fallbacks import NoGraphs
from specengine.runner.loader.load import check_quantization, model_class_of
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.loader.source import resolve_model
from specengine.runner.loader.tokenizer import load_tokenizer
from specengine.runner.memory.graph_memory import GraphMemory
from specengine.runner.memory.kept_state import state_shape_of
from specengine.runner.model_runner import MemoryPools, ModelRunner
from specengine.runner.worker import TpModelWorker
from specengine.scheduler.ledger import KVLedger
from specengine.scheduler.policy import SchedulePolicy
from specengine.scheduler.scheduler import Scheduler
from specengine.target.registry import find_model_class

logger = logging.getLogger(__name__)


def load(
    config: EngineConfig,
    phases: Phases,
    link: Link | None = None,
    sharers: ExpertSharers | None = None,
) -> LoadedModel:
    """Find, read and pack the model. link: from start_ranks. sharers: with --enable-dp-attention.
    Raises ConfigError or ModelLoadError."""
    link = link or NoLink()
    check_sharers(config, sharers)
    if config.parallel.tp_size != link.communicator.size:
        raise ConfigError(
            "--tp-size is for `serve`, `generate` and `bench throughput`; leave it out"
        )
    link.load(config)
    with phases.phase("find model"):
        source = resolve_model(config.model, config.server.sampling_defaults == "model")
        model_class_of(source, find_model_class)
        check_quantization(source, config.model.quantization)
        given, config = config, _resolved(config, source)
        check_has_rounds(config, source)
    with phases.phase("load tokenizer"):
        tokenizer = load_tokenizer(source, config.model.chat_template)
    device = torch.device(config.model.device)
    region = platform_of(device).new_region() if config.memory.enable_sleep_mode else None
    with phases.phase("load weights"), in_region(region):
        model = load_target(source, config.model, device, link.communicator, sharers)
    config = _resolved(given, source, model)
    parts = source, config, cast(DecoderModel, model), tokenizer, link
    return LoadedModel(*parts, region, sharers)


def _resolved(
    config: EngineConfig, source: ModelSource, model: object | None = None
) -> EngineConfig:
    """model: None before it is loaded."""
    keeps_state = model is not None and state_shape_of(model) is not None
    facts = source.context_length, source.dtype, keeps_state, source.longest_context
    return resolve(config, *facts)


def load_sharing(config: EngineConfig, phases: Phases, place: Meeting) -> LoadedModel:
    """The same of an engine of --enable-dp-attention, with ranks of its own (--tp-size). Waits for
    the other engines."""
    parallel, link = config.parallel, start_ranks(config, phases, place)
    device, symmetric = resolve_device(config.model.device), config.sums_in_one_kernel
    return load(config, phases, link, meet(place, device, symmetric, 0, parallel.tp_size))


def build_engine(
    config: EngineConfig, loaded: LoadedModel | None = None, phases: Phases | None = None
) -> Engine:
    """The engine of a configuration. `loaded` lends the weights of an earlier one, whose model
    section must be the same; `phases` goes on counting. Raises ConfigError, ModelLoadError or
    OutOfMemoryError."""
    phases = phases or Phases()
    costs = CostFile.of(config.spec)
    owns_ranks = loaded is None
    loaded = loaded or load(config, phases, start_ranks(config, phases))
    loaded.link.build(config)
    wants_pieces, config = config.graph.has_pieces, _resolved(config, loaded.source, loaded.model)
    with in_region(loaded.region):
        draft = load_draft(config, loaded, phases)
    with phases.phase("allocate memory"):
        backends = make_attention_backends(config.model, loaded.device)
        check_split(config, loaded, backends.target)
        with evenly(loaded.sharers):
            memory = allocate(config, loaded, draft, backends)
    runner = _make_runner(config.graph, loaded, memory, backends.target, draft.feature_layers)
    draft_runners = make_draft_runners(draft, runner, memory.draft_kv, backends.draft)
    share_experts(loaded.sharers, [runner, *draft_runners], draft.feature_size)
    if costs is not None:
        costs.facts = engine_facts(config, loaded, draft, backends.names)
    parts = _assemble(config, loaded, TpModelWorker(runner), draft_runners, memory, costs)
    engine = _engine_of(replace(parts, owns_ranks=owns_ranks))
    engine.weights = RunningWeights(config, loaded, draft)
    ranks = loaded.link.communicator
    engine.weights.pieces = add_pieces(config.graph, runner, phases, ranks, wants_pieces)
    engine.sleeper = make_sleeper(loaded, engine.weights, [memory.kv, memory.draft_kv])
    engine.ragged_counters = add_ragged_graphs(config, runner, draft_runners)
    text_depends_on_drafts = engine.parts.verifier.text_depends_on_drafts
    engine.ragged_counters |= add_draft_loops(
        config, engine.drafter, text_depends_on_drafts, runner.sharers is not None
    )
    add_split_prefills(config, engine, backends.target)
    with evenly(loaded.sharers):
        _capture(config, engine, runner, phases, costs, backends.draft)
    keep_at_the_end(costs, engine)
    engine.host_round.plan_ahead = make_plan_ahead(config, runner, engine.drafter)
    record_trace(engine, loaded)
    runner.graph_memory.log()
    logger.info("ready after %.1f s", phases.total)
    return engine


def _make_runner(
    graph: GraphConfig,
    loaded: LoadedModel,
    memory: Memory,
    backend: AttentionBackend,
    feature_layers: tuple[int, ...],
) -> ModelRunner:
    """The target's."""
    compiles = graph.enable_torch_compile and not graph.disable_cuda_graph
    return ModelRunner(
        loaded.model,
        loaded.device,
        MemoryPools(memory.rows, memory.kv, memory.states),
        backend,
        feature_layers,
        GraphMemory(memory.graph_budget, loaded.ranks, platform_of(loaded.device)),
        guards_graphs=graph.debug_cuda_graph,
        compile_max_bs=graph.torch_compile_max_bs if compiles else 0,
    )


def _capture(
    config: EngineConfig,
    engine: Engine,
    runner: ModelRunner,
    phases: Phases,
    costs: CostFile | None,
    draft_backend: AttentionBackend | None = None,
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
        rounds = make_rounds(config, runner, parts.drafter, parts.verifier, chooses, draft_backend)
        use_lanes(engine.split, rounds)
    except HostRoundsError as error:
        engine.no_rounds = NoGraphs("round", str(error))
    apply_cost_file(costs, engine, rounds)
    with phases.phase("compile kernels"):
        compile_ahead(config, runner, rounds, parts.drafter)
    with tally() as compiled:
        with phases.phase("capture graphs"):
            runner.capture_graphs(list(sizes), not config.graph.disable_cuda_graph_padding)
        if rounds is not None:
            with phases.phase("capture rounds"):
                engine.pipeline = make_pipeline(config, parts, rounds, costs)
                join_pipeline(engine.split, engine.pipeline)
            share_rounds(parts.sharers, rounds)
    if compiled.kernels:
        logger.info("compiled %d more kernels while capturing", compiled.kernels)
    if config.graph.cuda_graph_profile is not None:
        with phases.phase("profile graphs"):
            writes = parts.link.communicator.rank == 0
            profile_graphs(runner, engine.device_rounds, config.graph.cuda_graph_profile, writes)


def _make_scheduler(config: EngineConfig, loaded: LoadedModel, memory: Memory) -> Scheduler:
    context, page_size = required(config.model.context_length), config.memory.page_size
    ledger = KVLedger(
        memory.rows,
        TokenToKVPoolAllocator(memory.num_slots, page_size),
        RadixCache(page_size, config.memory.disable_radix_cache),
        snapshots_of(memory),
    )
    policy = SchedulePolicy(
        context_len=context,
        max_running_requests=required(config.schedule.max_running_requests),
        chunked_prefill_size=required(config.schedule.chunked_prefill_size),
        max_nodes=max_nodes(config.spec),
        draft_slots=draft_slots(config.spec),
        enable_mixed_chunk=config.schedule.enable_mixed_chunk,
    )

    make_decoder = partial(decoder_of, loaded.tokenizer)
    return Scheduler(policy, ledger, loaded.model.vocab_size, loaded.device, make_decoder)


def _assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    worker: TpModelWorker,
    draft_runners: Sequence[ModelRunner],
    memory: Memory,
    costs: CostFile | None,
) -> EngineParts:
    scheduler = _make_scheduler(config, loaded, memory)
    num_rows = memory.rows.req_to_token.shape[0]
    vocab_size, eos_ids = loaded.model.vocab_size, loaded.source.eos_token_ids
    limit = NodeLimit(scheduler.round_limit)
    drafter = make_drafter(
        DraftContext(config.spec, limit, draft_runners, num_rows, worker.runner.device)
    )
    check_sizes(config.spec, drafter)
    verifier = make_verifier(config.spec, drafter)
    verifier.sampler = worker.runner.sample
    if verifier.text_depends_on_drafts:  # else no text depends on the state of the drafter
        scheduler.ledger.cache.lookahead = drafter.kv_lookahead
    by_hand = None if costs is None else costs.by_hand
    if drafter.proposes_tree:
        check_trees(worker.runner.attn_backend, worker.runner.attn_layers)
    return EngineParts(
        link=loaded.link,
        sharers=loaded.sharers,
        config=config,
        model_name=(*config.model.served_names, loaded.source.name)[0],
        tokenizer=loaded.tokenizer,
        eos_ids=eos_ids,
        vocab_size=vocab_size,
        context_length=required(config.model.context_length),
        worker=worker,
        scheduler=scheduler,
        drafter=drafter,
        verifier=traced_verifier(config.trace, verifier),
        sample_prefill=partial(sample_prefill, sample=worker.runner.sample),
        grammars=GrammarCompiler(loaded.tokenizer, vocab_size, eos_ids),
        fixed_depth=fixed_depth(config, drafter, verifier),
        adaptive=make_adaptive(config, drafter, verifier, limit, by_hand, loaded.link),
        pooling=loaded.source.pooling,
        sampling_defaults=loaded.source.sampling_defaults,
    )


def _engine_of(parts: EngineParts) -> Engine:
    """One that goes in lock-step, where there are other ranks."""
    runner = parts.worker.runner
    reads_states = parts.drafter.needs_hidden and not runner.feature_layers
    runner.reads_hidden = reads_states or parts.pooling is not None
    if parts.link.communicator.size == 1:
        return Engine(parts)
    from specengine.engine.parallel.lead import make_engine  # msgspec's, which others do without

    return make_engine(parts)
