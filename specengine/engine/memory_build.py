"""Measures what an engine's forwards take, and allocates its KV and page table beside that."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from specengine.core.config import EngineConfig
from specengine.core.platform import platform_of
from specengine.core.region import in_region
from specengine.draft.loaded import LoadedDraft
from specengine.engine.factories import max_nodes
from specengine.engine.forward_graphs_build import graph_bytes
from specengine.engine.precompile import can_precompile, precompile_calls
from specengine.engine.resolve import torch_dtype
from specengine.memory.kv_cache import KVShape, MHATokenToKVPool
from specengine.memory.req_to_token import ReqToTokenPool
from specengine.memory.state_pool import StatePool, StateSizes
from specengine.memory.state_snapshots import StateSnapshots
from specengine.runner.attention import AttentionBackends
from specengine.runner.forward_graphs.keys import MAX_TOKENS
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.memory.kept_state import make_states, state_shape_of
from specengine.runner.memory.kv_shape import kv_shape_of
from specengine.runner.memory.plan import GIB, MemoryPlan
from specengine.runner.memory.profile import peak_of_forward

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Rows of logits in the forward that memory is measured with.
MAX_PROFILED_REQUESTS = 64
# Most snapshots of recurrent state that the prefix cache keeps, where nothing else is asked for.
DEFAULT_SNAPSHOTS = 32


@dataclass(frozen=True)
class Memory:
    """The KV memory of one engine, and the page table."""

    rows: ReqToTokenPool
    kv: MHATokenToKVPool
    draft_kv: MHATokenToKVPool  # the same slots
    states: StatePool | None  # of a target that keeps recurrent state
    num_slots: int
    graph_budget: int


def allocate(
    config: EngineConfig, loaded: LoadedModel, draft: LoadedDraft, backends: AttentionBackends
) -> Memory:
    plan, sizes = _plan_memory(config, loaded, draft, backends)
    # The first page belongs to no request: padding rows of graphs write there.
    num_tokens, graph_budget = plan.least_of(loaded.ranks)
    num_slots = num_tokens + config.memory.page_size
    rows = required(config.schedule.max_running_requests)
    with in_region(loaded.region):
        kv = MHATokenToKVPool(num_slots, _kv_shape(loaded), loaded.device)
        draft_kv = MHATokenToKVPool(num_slots, draft.kv_shape, loaded.device)
        states = make_states(loaded.model, sizes, loaded.device)
    return Memory(
        rows=ReqToTokenPool(rows, required(config.model.context_length), loaded.device),
        kv=kv,
        draft_kv=draft_kv,
        states=states,
        num_slots=num_slots,
        graph_budget=graph_budget,
    )


def _state_sizes(config: EngineConfig) -> StateSizes:
    """Sizes of the state pool, for as many requests as may run and as many snapshots as are asked
    for: none where memory decides."""
    requests = required(config.schedule.max_running_requests)
    wanted, has_cache = config.memory.max_state_snapshots, not config.memory.disable_radix_cache
    nodes = requests * max_nodes(config.spec)
    return StateSizes(
        rows=requests + 1,
        snapshots=(wanted or 0) if has_cache else 0,
        # Verifications in graphs are padded, up to twice their nodes or to MAX_TOKENS.
        nodes=min(2 * nodes, max(nodes, MAX_TOKENS)),
    )


def snapshots_of(memory: Memory) -> StateSnapshots | None:
    """None where the target keeps no recurrent state."""
    if memory.states is None:
        return None
    sizes = memory.states.sizes
    return StateSnapshots(sizes.rows, sizes.snapshots, memory.states.copy)


def _kv_shape(loaded: LoadedModel) -> KVShape:
    model = loaded.config.model
    is_fp8 = model.kv_cache_dtype == "fp8"
    dtype = torch.float8_e4m3fn if is_fp8 else torch_dtype(model.dtype)
    return kv_shape_of([loaded.model], dtype)


def _plan_memory(
    config: EngineConfig, loaded: LoadedModel, draft: LoadedDraft, backends: AttentionBackends
) -> tuple[MemoryPlan, StateSizes]:
    platform, schedule = platform_of(loaded.device), config.schedule
    memory = platform.memory(loaded.device)
    shape = _kv_shape(loaded)
    context, rows = required(config.model.context_length), required(schedule.max_running_requests)
    limit = config.memory.max_total_tokens or rows * context
    current = peak = memory.current()
    graphs = 0
    if platform.is_accelerator:
        chunk = required(schedule.chunked_prefill_size)
        tokens = chunk if chunk > 0 else context
        requests = min(rows, tokens, MAX_PROFILED_REQUESTS)
        tokens = min(tokens, requests * context)  # no position past the rotary table
        measure = partial(_peak, loaded, draft, backends, tokens, requests)
        if can_precompile(config, backends.target, backends.draft):
            precompile_calls([measure])
        needed = measure()
        peak += needed * (1 + config.split.num_lanes)  # each stream keeps what it has allocated
        graphs = graph_bytes(config, loaded.model, needed // tokens)
    plan = MemoryPlan(
        total=memory.total() // (1 if platform.is_accelerator else config.parallel.tp_size),
        fraction=required(config.memory.mem_fraction_static),
        used=memory.used(),
        peak=peak,
        current=current,
        bytes_per_token=shape.bytes_per_token + draft.kv_shape.bytes_per_token,
        limit_tokens=limit,
        page_size=config.memory.page_size,
        graphs=graphs,
    )
    page_size = config.memory.page_size
    needed = min(context, limit // page_size * page_size)
    plan, sizes = _with_states(plan, config, loaded, needed)
    plan.check(needed)
    plan.log()
    return plan, sizes


def _with_states(
    plan: MemoryPlan, config: EngineConfig, loaded: LoadedModel, needed_tokens: int
) -> tuple[MemoryPlan, StateSizes]:
    """What the target's recurrent state takes, and the sizes of its pool: all are 0 where it keeps
    none. All ranks call this at the same place: they keep equally many snapshots."""
    shape = state_shape_of(loaded.model)
    if shape is None:
        return plan, StateSizes(0)
    sizes, size = _state_sizes(config), shape.bytes_per_slot
    plan = replace(plan, states=sizes.num_bytes(shape), snapshots=sizes.snapshots * size)
    if config.memory.max_state_snapshots is not None or config.memory.disable_radix_cache:
        return plan, sizes
    most = min(sizes.rows - 1, DEFAULT_SNAPSHOTS)
    fitting = plan.snapshots_beside(needed_tokens, size, most)
    count = -loaded.ranks.greatest([-fitting])[0]
    if count < most:
        logger.warning(
            "memory is short: %d snapshots of recurrent state in place of %d, so that fewer "
            "prefixes are found; --max-running-requests %d takes %.2f GiB of states",
            *(count, most, sizes.rows - 1, plan.states / GIB),
        )
    sizes = replace(sizes, snapshots=count)
    return replace(plan, states=sizes.num_bytes(shape), snapshots=count * size), sizes


def _peak(
    loaded: LoadedModel, draft: LoadedDraft, backends: AttentionBackends, tokens: int, requests: int
) -> int:
    """Bytes that a forward of this size needs, of the target or of a drafter's model."""
    size, layers = (tokens, requests, loaded.device), draft.feature_layers
    needed = [peak_of_forward(loaded.model, backends.target, _kv_shape(loaded), *size, layers)]
    for model in draft.models:
        width = draft.feature_size
        needed.append(
            peak_of_forward(model, backends.draft, draft.kv_shape, *size, feature_size=width)
        )
    return max(needed)


def required(value: T | None) -> T:
    """A field that `resolve` has filled."""
    assert value is not None
    return value
