"""The concrete pieces of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from specengine.core.batch import ScheduleBatch
from specengine.core.config import EngineConfig
from specengine.core.drafter import Drafter
from specengine.core.interfaces import LogitsOutput
from specengine.core.parallel import Link, NoLink
from specengine.core.pooling import Pooling
from specengine.core.sharing import ExpertSharers
from specengine.core.spec import PrefillResult, Verifier
from specengine.core.spec_stats import DepthChoice
from specengine.engine.adaptive.host_rounds import AdaptiveRound
from specengine.engine.grammar.compiler import GrammarCompiler
from specengine.runner.worker import TpModelWorker
from specengine.scheduler.scheduler import Scheduler

# Called with first tokens, as Drafter.begin_async: where it is given, `begin` is not called.
BeginAsync = Callable[[Tensor], None]


@dataclass(frozen=True)
class EngineParts:
    """The concrete pieces that build.py chose."""

    config: EngineConfig
    model_name: str
    tokenizer: Any  # transformers' fast tokenizer
    eos_ids: frozenset[int]
    vocab_size: int
    context_length: int
    worker: TpModelWorker
    scheduler: Scheduler
    drafter: Drafter
    verifier: Verifier
    sample_prefill: Callable[[LogitsOutput, ScheduleBatch, BeginAsync | None], PrefillResult]
    grammars: GrammarCompiler
    fixed_depth: DepthChoice  # of rounds for which none is chosen
    adaptive: AdaptiveRound | None = None
    pooling: Pooling | None = None  # of an embedding model
    # Fields of SamplingParams, by name, for requests of a server that leave them out.
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    link: Link = field(default_factory=NoLink)  # to the other ranks
    owns_ranks: bool = False  # which end with this engine
    sharers: ExpertSharers | None = None  # ranks with requests of their own
