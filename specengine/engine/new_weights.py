"""Other weights for a running engine: read whole and compared first, then put in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError, ModelLoadError, SpecEngineError
from specengine.core.model import DecoderModel
from specengine.core.parallel import on_all
from specengine.draft.loaded import LoadedDraft
from specengine.engine.draft_build import load_draft
from specengine.engine.phases import Phases
from specengine.engine.target_build import load_target
from specengine.layers.in_place import check_alike, put_weights, refresh_head
from specengine.runner.loader.load import quantization_of
from specengine.runner.loader.loaded_model import LoadedModel
from specengine.runner.loader.model_source import ModelSource
from specengine.runner.loader.source import resolve_model
from specengine.runner.piecewise.forwards import PiecewiseForwards

logger = logging.getLogger(__name__)

# Of config.json, what says nothing of how the model computes: where it comes from, its form in
# memory, and how it was trained, which each version of transformers writes or leaves out.
_UNRELATED = frozenset(
    {"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype"}
    | {"attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop"}
    | {"attn_pdrop", "initializer_range", "pretraining_tp", "pad_token_id"}
    | {"output_router_logits", "router_aux_loss_coef", "router_z_loss_coef"}
)


@dataclass(frozen=True)
class NewWeights:
    """Models that are alike those that run. None and empty are left as they are."""

    source: ModelSource | None
    target: nn.Module | None
    drafts: tuple[nn.Module, ...]
    draft_model: str | None = None  # as --speculative-draft-model-path would name it


class RunningWeights:
    """The models of one engine, whose weights can be replaced between two steps."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, draft: LoadedDraft) -> None:
        """config: resolved."""
        self.config = config
        self.loaded = loaded
        self.draft = draft
        self.draft_model: str | None = None  # that took the place of the first
        self.pieces: PiecewiseForwards | None = None  # of the target; set by build.build_engine

    def read(self, model: str | None = None, draft_model: str | None = None) -> NewWeights:
        """The weights of a model, of a draft model, or of both, by name, directory, GGUF file or
        hub id. A drafter whose weights are part of the target's checkpoint comes with the target.
        Each rank reads its own parts, and all ranks call this.

        Takes memory for a second copy: of a target in floating point on the host, else on the
        device. Raises ConfigError or ModelLoadError where they cannot take the place of those that
        run, or cannot be read, on whichever rank; nothing has changed then.
        """
        return on_all(
            self.loaded.ranks,
            lambda: _or_refused(lambda: self._read(model, draft_model)),
            "cannot read its part of the new weights",
            ModelLoadError,
        )

    def _read(self, model: str | None, draft_model: str | None) -> NewWeights:
        if model is None and draft_model is None:
            raise ConfigError("name a model, a draft model or both")
        if draft_model is not None and not self.draft.models:
            name = self.config.spec.algorithm
            drafter = f"the drafter {name}, which has no model" if name else "no drafter"
            raise ConfigError(f"the engine has {drafter}: name the model's weights alone")
        source = None if model is None else self._source(model)
        target = None if source is None else self._target(source)
        comes_along = source is not None and self.config.spec.draft_model_path is None
        drafts: tuple[nn.Module, ...] = ()
        if draft_model is not None or (comes_along and self.draft.models):
            drafts = self._drafts(source or self.loaded.source, draft_model)
        return NewWeights(source, target, drafts, draft_model)

    def read_again(self) -> NewWeights:
        """The weights that run, from where they came. Raises ModelLoadError where that is gone or
        cannot be read."""
        return _or_refused(self._read_again)

    def _read_again(self) -> NewWeights:
        source = self.loaded.source
        drafts = self._drafts(source, self.draft_model) if self.draft.models else ()
        return NewWeights(source, self._target(source), drafts, self.draft_model)

    def check_places(self) -> None:
        """Raises ConfigError where weights that run came from tensors, or their files are gone."""
        source, draft = self.loaded.source, self.draft_model
        places = [source.directory, source.gguf_file, Path(draft) if draft else None]
        for place in places:
            if place is not None and place.is_absolute() and not place.exists():
                raise ConfigError(
                    f"the weights that run came from {place}, which is gone: they cannot be read "
                    "again; sleep with level 1, which keeps them"
                )

    def put(self, new: NewWeights) -> None:
        """While no forward runs. KV and states of the old weights are wrong afterwards."""
        if new.target is not None and new.source is not None:
            put_weights(cast(nn.Module, self.loaded.model), new.target)
            self.loaded = replace(self.loaded, source=new.source)
            if self.pieces is not None:
                self.pieces.refresh()
        if new.drafts:
            self.draft_model = new.draft_model  # None: of the target, or as the engine was started
            for mine, other in zip(self.draft.models, new.drafts, strict=True):
                put_weights(cast(nn.Module, mine), other)
        for one in self.draft.models:
            refresh_head(cast(nn.Module, one))

    @contextmanager
    def directory_of(self, tensors: Mapping[str, Tensor], draft: bool = False) -> Iterator[str]:
        """A directory for `read`, of tensors under a checkpoint's names and the configuration that
        runs. It is gone afterwards. draft: of the draft model."""
        directory = self._draft_directory() if draft else self.loaded.source.directory
        if directory is None:
            raise ConfigError("tensors take the place of weights that came from a directory")
        with TemporaryDirectory() as made:
            for path in Path(directory).glob("*.json"):
                if not path.name.endswith(".index.json"):
                    (Path(made) / path.name).write_bytes(path.read_bytes())
            kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(kept, str(Path(made) / "model.safetensors"))
            yield made

    def _draft_directory(self) -> Path | None:
        path = self.config.spec.draft_model_path
        return Path(path) if path is not None and Path(path).is_dir() else None

    def _source(self, model: str) -> ModelSource:
        source, running = self._find(model), self.loaded.source
        ours, theirs = (_fields(one.hf_config) for one in (running, source))
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise ModelLoadError(
                    f"config.json of {source.name} says {name} {theirs.get(name)!r}, and the model "
                    f"that runs {ours.get(name)!r}: start another engine for it"
                )
        return source

    def _find(self, model: str) -> ModelSource:
        return resolve_model(replace(self.config.model, model=model, load_format="auto"))

    def _target(self, source: ModelSource) -> nn.Module:
        model, device = self.loaded.config.model, self.loaded.device
        # Random weights are other ones on another device.
        on_host = quantization_of(source, model.quantization) is None and not source.is_dummy
        made = load_target(
            source,
            model,
            torch.device("cpu") if on_host else device,
            self.loaded.link.communicator,
            self.loaded.sharers,
            packs=device.type == "cpu",
        )
        check_alike(cast(nn.Module, self.loaded.model), made)
        return made

    def _drafts(self, source: ModelSource, draft_model: str | None) -> tuple[nn.Module, ...]:
        spec = self.config.spec
        spec = replace(spec, draft_model_path=draft_model or spec.draft_model_path)
        loaded = replace(self.loaded, source=source)
        found = load_draft(replace(self.config, spec=spec), loaded, Phases())
        have, want = found.feature_layers, self.draft.feature_layers
        if have != want or found.kv_shape != self.draft.kv_shape:
            raise ModelLoadError(
                f"the draft model reads target layers {list(have)} and keeps {found.kv_shape}; the "
                f"one that runs reads {list(want)} and keeps {self.draft.kv_shape}"
            )
        return tuple(_alike(self.draft.models, found.models))


def _or_refused(read: Callable[[], NewWeights]) -> NewWeights:
    """What `read` gives. Whatever fails in it, nothing of the engine has changed."""
    try:
        return read()
    except SpecEngineError:
        raise
    except Exception as error:
        logger.exception("weights cannot be read")
        raise ModelLoadError(
            f"the weights cannot be read ({type(error).__name__}: {error}); see to their "
            "files, or to the log, which says where"
        ) from error


def _alike(mine: Sequence[DecoderModel], others: Sequence[DecoderModel]) -> Iterator[nn.Module]:
    if len(mine) != len(others):
        raise ModelLoadError(f"{len(others)} draft models take the place of {len(mine)}")
    for old, new in zip(mine, others, strict=True):
        check_alike(cast(nn.Module, old), cast(nn.Module, new))
        yield cast(nn.Module, new)


def _fields(config: Any) -> dict[str, Any]:
    return {name: one for name, one in config.to_dict().items() if name not in _UNRELATED}
