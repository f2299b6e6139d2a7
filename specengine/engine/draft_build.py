"""Drafters that run a model, on their way into an engine: their weights and runners."""

from __future__ import annotations

from specengine.core.batch import AttentionBackend
from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.errors import ConfigError
from specengine.core.parallel import NoLink, split_over
from specengine.core.sharing import sharing_experts
from specengine.draft.loaded import NO_DRAFT, DraftTarget, LoadedDraft
from specengine.engine.factories import drafter_class
from specengine.engine.phases import Phases
from specengine.engine.resolve import torch_dtype
from specengine.engine.spec_options import draft_slots
from specengine.memory.kv_cache import MHATokenToKVPool
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.model_runner import MemoryPools, ModelRunner
from specengine.target.registry import find_model_class


def load_draft(config: EngineConfig, loaded: LoadedModel, phases: Phases) -> LoadedDraft:
    """The weights that the algorithm drafts with; no model where it drafts without. Raises
    ConfigError or ModelLoadError where they are missing or do not fit the target."""
    spec, context = config.spec, config.model.context_length
    load = None if spec.algorithm is None else drafter_class(spec.algorithm).load_draft
    if load is None:
        return NO_DRAFT
    assert context is not None, "resolved"
    dtype = torch_dtype(loaded.config.model.dtype)
    target = DraftTarget(spec, loaded, context, dtype, find_model_class)
    ranks = loaded.link.communicator if config.parallel.splits_draft else NoLink.communicator
    loading = phases.phase("load draft model")
    with loading, split_over(ranks), sharing_experts(loaded.sharers):
        draft: LoadedDraft = load(target)
    _check_shape(spec, draft, context)
    return draft


def _check_shape(spec: SpecConfig, draft: LoadedDraft, context_length: int) -> None:
    most = min(model.vocab_size for model in draft.models)
    if spec.eagle_topk > most:
        raise ConfigError(
            f"--speculative-eagle-topk {spec.eagle_topk} exceeds the draft's vocabulary of {most}"
        )
    if (slots := draft_slots(spec)) > context_length:
        raise ConfigError(
            f"drafts take up {slots} KV slots and requests have {context_length}; lower "
            "--speculative-num-steps or --speculative-eagle-topk, or raise --context-length"
        )


def make_draft_runners(
    draft: LoadedDraft, target: ModelRunner, kv: MHATokenToKVPool, backend: AttentionBackend
) -> tuple[ModelRunner, ...]:
    """One a model, on the target's page table and memory of graphs: forwards take turns. Captures
    are guarded and compiled as the target's."""
    pools = MemoryPools(target.pools.req_to_token_pool, kv)
    return tuple(
        ModelRunner(
            model,
            target.device,
            pools,
            backend,
            graph_memory=target.graph_memory,
            guards_graphs=target.guards_graphs,
            compile_max_bs=target.compile_max_bs,
        )
        for model in draft.models
    )
