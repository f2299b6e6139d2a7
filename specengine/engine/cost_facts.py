"""What makes rounds cost what they cost: a table holds for one engine's, on one kind of machine."""

from __future__ import annotations

import hashlib
import weakref
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import torch
from torch import nn

from specengine.core.config import EngineConfig
from specengine.core.model import DecoderModel
from specengine.core.platform import platform_of
from specengine.core.version import __version__
from specengine.draft.loaded import LoadedDraft
from specengine.draft.zoo.shipped import draft_path_of
from specengine.engine.adaptive.cost_file import CostFile, Facts
from specengine.engine.loop import Engine
from specengine.engine.round.executor import RoundExecutor
from specengine.engine.round.timing import max_context
from specengine.kernels import dispatch
from specengine.runner.loader.loaded_model import LoadedModel

# Options that change no round's cost, or that other facts state.
_UNRELATED = {
    "served_model_name",
    "chat_template",
    "cache_dir",
    "load_format",
    "random_seed",
    "mem_fraction_static",
    "max_total_tokens",
    "disable_radix_cache",
    "chunked_prefill_size",
    "max_queued_requests",
    "cuda_graph_max_bs",
    "adaptive",
    "cost_table",
}
_STATED = {
    "model",
    "draft_model_path",
    "device",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "draft_attention_backend",
}
_SOURCES = {".py", ".cu", ".cuh", ".cpp", ".c", ".h"}
_PACKAGES = ("triton", "flashinfer-python", "sglang-kernel")


def engine_facts(
    config: EngineConfig, loaded: LoadedModel, draft: LoadedDraft, backend: str
) -> Facts:
    """config: resolved. backend: of attention, by name."""
    facts: Facts = {
        "specengine": __version__,
        "kernels": _digest(Path(dispatch.__file__).parent),
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "device": platform_of(loaded.device).device_name(loaded.device),
        "model": loaded.source.name,
        "model_bytes": _bytes(loaded.model),
        "draft_model": draft_path_of(config.spec, config.model),
        "draft_bytes": [_bytes(one) for one in draft.models],
        "attention_backend": backend,
    }
    rounds = (config.parallel, config.graph, config.spec)
    for section in (config.model, config.memory, config.schedule, *rounds):
        for field in section.options().keys() - _UNRELATED - _STATED:
            facts[section.flag_prefix + field] = getattr(section, field)
    return dict(sorted(facts.items()))


def apply_cost_file(costs: CostFile | None, engine: Engine, rounds: RoundExecutor | None) -> None:
    """Before minutes are spent on graphs. rounds: those that will run on the device, if any.
    Raises ConfigError for a table that was measured for something else."""
    adaptive = engine.parts.adaptive
    if costs is None or adaptive is None:
        return
    costs.add_facts(_round_facts(rounds))
    if rounds is None:
        costs.start(adaptive.chooser.costs)


def keep_at_the_end(costs: CostFile | None, engine: Engine) -> None:
    """What its rounds teach is kept when the engine is closed, is gone, or the process ends."""
    chooser = next(engine.choosers(), None)
    if costs is not None and chooser is not None and not chooser.costs.is_fixed:
        engine.at_end = weakref.finalize(engine, costs.keep_learned, chooser.costs)


def _round_facts(rounds: RoundExecutor | None) -> Facts:
    if rounds is None:
        return {"rounds": "run by the host"}
    drafts = "drafts of the host" if rounds.source.host_drafts else "on the device"
    sizes = {bs: rounds.smaller_trees(bs) for bs in rounds.batch_sizes}
    return {
        "rounds": f"in graphs, {drafts}",
        "round_batch_sizes": rounds.batch_sizes,
        "round_depths": rounds.steps,
        "round_smaller_trees": {bs: found for bs, found in sizes.items() if found},
        "round_may_pause": rounds.may_pause,
        "round_max_context": max_context(rounds),
    }


def _digest(folder: Path) -> str:
    """A digest of the folder's sources: kernels change while the version stays."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _bytes(model: DecoderModel) -> int:
    return sum(one.nbytes for one in cast(nn.Module, model).parameters())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
