"""Training EAGLE-3 drafters for a target."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from specengine.core.errors import ConfigError
from specengine.core.options import option
from specengine.draft.rope import draft_rope
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.packing import PackedBatch, pack
from specengine.draft.train.eagle3 import Eagle3Draft
from specengine.draft.train.eagle3_given import GivenDrafter
from specengine.draft.train.export import (
    DTYPES,
    eagle3_config,
    vocabulary_tensors,
    write_drafter,
)
from specengine.draft.train.teacher import Teacher
from specengine.draft.train.unroll import Borrowed, rotary_table
from specengine.draft.train.unrolled_task import UnrollConfig, UnrolledTask
from specengine.draft.train.vocabulary import DraftVocabulary, choose_vocabulary
from specengine.layers.layer_spec import LayerSpec
from specengine.runner.loader.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

_SAMPLE_TOKENS = 8192  # that the scale of features is taken from


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(UnrollConfig):
    init: str | None = option(
        None, "a drafter to begin with, by directory or shipped name, whose measures it takes"
    )
    draft_vocab_size: int | None = option(None, "tokens that it can say; default: all")
    own_head: bool = option(True, "train and store a head; else rows of the target's are borrowed")
    intermediate_size: int | None = option(None, "width of its feed-forward; default: the target's")
    num_heads: int | None = option(None, "heads of queries; default: the target's")
    num_kv_heads: int | None = option(None, "heads of keys and values; default: the target's")
    feature_layers: tuple[int, ...] | None = option(
        None, "layers of the target, counted from 0, whose outputs it reads; default: EAGLE-3's"
    )
    dtype: str = option("bfloat16", "of the exported weights", ("bfloat16", "float32"))

    def _check_ranges(self) -> None:
        super()._check_ranges()
        self._at_least(1, "draft_vocab_size", "intermediate_size", "num_heads", "num_kv_heads")


class ShapeOptions(Protocol):
    """None is as of the target."""

    @property
    def intermediate_size(self) -> int | None: ...

    @property
    def num_heads(self) -> int | None: ...

    @property
    def num_kv_heads(self) -> int | None: ...


class Eagle3Task(UnrolledTask):
    """A draft.train.task.TrainTask, made by make_eagle3_task."""

    name = "eagle3"
    module: Eagle3Draft

    def __init__(
        self,
        module: Eagle3Draft,
        teacher: Teacher,
        config: Eagle3Config,
        shape: LayerSpec,
        vocabulary: DraftVocabulary,
    ) -> None:
        ids = None if vocabulary.is_whole else vocabulary.target_ids.to(teacher.device)
        super().__init__(module, teacher, config, ids)
        self.shape = shape
        self.vocabulary = vocabulary
        self.dtype = DTYPES[config.dtype]

    def export(self, directory: Path) -> None:
        """In SGLang's and SpecForge's layout. The target's embedding is not stored, nor is a head
        that is the target's."""
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        tensors["fc.weight"] = self.module.checkpoint_fc()
        tensors |= vocabulary_tensors(self.vocabulary)
        layers = self.teacher.feature_layers
        config = eagle3_config(self.teacher.config, self.shape, self.vocabulary, layers)
        write_drafter(directory, tensors, config, self.dtype)


def make_eagle3_task(
    loaded: LoadedModel, documents: TokenDataset, config: Eagle3Config
) -> Eagle3Task:
    """documents: those to train on; the vocabulary is chosen from them. Initial weights are drawn
    from torch's generator. Raises ConfigError or DataError."""
    given = None if config.init is None else GivenDrafter.read(config.init)
    config = config if given is None else with_measures(config, given)
    layers = config.feature_layers or default_feature_layers(loaded.model.num_layers)
    teacher = Teacher(loaded, layers, cache_mb=config.feature_cache_mb)
    vocabulary = (given and given.vocabulary(teacher.vocab_size)) or choose_vocabulary(
        documents.documents, teacher.vocab_size, config.draft_vocab_size
    )
    shape = draft_shape(loaded.model, config)
    head = teacher.head_table()[vocabulary.target_ids.to(teacher.device)]
    borrowed = Borrowed(
        teacher.embed_table,
        None if config.own_head else head.to(teacher.dtype),
        rotary_table(teacher, shape, draft_rope(teacher.config)),
    )
    feature_size = len(layers) * teacher.hidden_size
    compiles = config.compiles_on(teacher.device)
    own_head = head.cpu() if config.own_head else None
    module = Eagle3Draft(shape, feature_size, borrowed, own_head, compiles)
    sample = teacher.forward(sample_batch(documents).to(teacher.device))
    module.begin(sample.features.cpu(), teacher.final_norm().cpu())
    if given is not None:
        given.fill(module)
    sizes = {name: one.numel() for name, one in module.named_parameters()}
    head_size = sizes.get("lm_head.weight", 0)
    logger.info(
        "EAGLE-3 draft: %.2f M parameters (%.2f M of them in its head), features of layers %s",
        sum(sizes.values()) / 1e6,
        head_size / 1e6,
        list(layers),
    )
    return Eagle3Task(module, teacher, config, shape, vocabulary)


def with_measures(config: Eagle3Config, given: GivenDrafter) -> Eagle3Config:
    """The configuration with a drafter's sizes, layers and head. Raises ConfigError where it says
    otherwise itself."""
    found = given.measures
    for name in ("intermediate_size", "num_heads", "num_kv_heads", "feature_layers"):
        asked = getattr(config, name)
        if asked is not None and asked != found[name]:
            raise ConfigError(
                f"task.{name}={asked}, and {found[name]} in task.init={given.name}: leave one out"
            )
    return replace(config, **found)


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """The target's feature layers, counted from 0 by output: EAGLE-3's; spread evenly where a
    target is so shallow that those would not ascend."""
    usual = (1, num_layers // 2 - 1, num_layers - 4)
    if usual[0] < usual[1] < usual[2]:
        return usual
    return tuple(sorted({0, num_layers // 2, num_layers - 1}))


def draft_shape(target: Any, config: ShapeOptions) -> LayerSpec:
    """A plain layer of the measures of a target's last one, whatever else that has. target: a model
    of target/models."""
    like: LayerSpec = target.layer_specs(target.config)[-1]
    return LayerSpec(
        hidden_size=like.hidden_size,
        intermediate_size=config.intermediate_size or like.intermediate_size,
        num_heads=config.num_heads or like.num_heads,
        num_kv_heads=config.num_kv_heads or like.num_kv_heads,
        head_dim=like.head_dim,
        rms_norm_eps=like.rms_norm_eps,
    )


def sample_batch(documents: TokenDataset) -> PackedBatch:
    """The first documents, a few thousand tokens."""
    count = int((documents.lengths.cumsum() <= _SAMPLE_TOKENS).sum())
    return pack(documents, np.arange(max(count, 1)))
