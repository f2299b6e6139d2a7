"""A data set from an engine: `specengine data make`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.fingerprint import tokenizer_sha256
from specengine.draft.train.data.manifest import TargetIdentity
from specengine.draft.train.data.prompts import read_prompts
from specengine.draft.train.data.writer import DatasetWriter
from specengine.engine.build import build_engine, load
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.lab.environment import environment, sha256_of_files, sha256_of_text
from specengine.lab.generate.batch_writer import BatchWriter, Work
from specengine.lab.generate.chat import ChatFormat
from specengine.lab.generate.config import GenerationConfig
from specengine.lab.generate.dialogue_writer import DialogueWriter
from specengine.lab.generate.driver import EngineDriver
from specengine.lab.generate.plans import make_plans
from specengine.lab.generate.words import ForbiddenTexts
from specengine.runner.loader.loaded_model import LoadedModel


def make_dataset(
    engine_config: EngineConfig,
    config: GenerationConfig,
    directory: Path,
    watch: Callable[[BatchWriter], None],
) -> TokenDataset:
    """Make a data set in `directory`, or go on with one that was interrupted there.

    watch: called after every forward. Raises ConfigError, ModelLoadError or OutOfMemoryError
    before the work begins, and DataError where files cannot be read or written.
    """
    plans = make_plans(config)
    forbidden = ForbiddenTexts(
        (turn for path in config.decontaminate for one in read_prompts(path) for turn in one.turns),
        config.decontaminate_ngram,
    )
    loaded = load(engine_config, Phases())
    _check_fits(config, loaded)
    target = identify(loaded)
    recipe = make_recipe(config, target, loaded)
    writer = DatasetWriter(directory, target.vocab_size, recipe)
    dialogue_writer = DialogueWriter(config, ChatFormat(loaded.tokenizer), forbidden)
    engine = build_engine(engine_config, loaded)
    driver: EngineDriver[Work] = EngineDriver(engine, _concurrency(config, engine))
    batch_writer = BatchWriter(config, plans, dialogue_writer, driver, writer)
    start = monotonic()
    limit = config.max_minutes
    batch_writer.run(None if limit is None else start + 60 * limit, watch)
    seconds = monotonic() - start
    made = {**recipe, "seconds": round(seconds, 1), "environment": environment("specengine")}
    return writer.finish(target, config.seed, made)


def identify(loaded: LoadedModel) -> TargetIdentity:
    source, seed = loaded.source, loaded.config.model.random_seed
    if source.is_dummy:
        weights = sha256_of_text(f"random, seed {seed}: {source.hf_config.to_json_string()}")
    elif source.gguf_file is not None:
        weights = sha256_of_files([source.gguf_file])
    else:
        assert source.directory is not None, "a model is a file, a directory or random"
        weights = sha256_of_files(list(source.directory.glob("*.safetensors")))
    return TargetIdentity(
        name=source.name,
        weights=weights,
        tokenizer=tokenizer_sha256(loaded.tokenizer),
        chat_template=sha256_of_text(loaded.tokenizer.chat_template or ""),
        vocab_size=loaded.model.vocab_size,
    )


def make_recipe(
    config: GenerationConfig, target: TargetIdentity, loaded: LoadedModel
) -> Mapping[str, Any]:
    """What the documents follow from. Files count by their contents, wherever they lie."""
    paths = [*config.prompts, *config.decontaminate]
    paths += [config.openings] if config.openings else []
    model = loaded.config.model
    return {
        **config.recipe(),
        "prompts": [Path(path).name for path in config.prompts],
        "decontaminate": [Path(path).name for path in config.decontaminate],
        "openings": Path(config.openings).name if config.openings else None,
        "files": {Path(path).name: sha256_of_files([Path(path)]) for path in paths},
        "target": asdict(target),
        "dtype": model.dtype,
        "quantization": model.quantization,
    }


def _check_fits(config: GenerationConfig, loaded: LoadedModel) -> None:
    context = loaded.config.model.context_length
    if context is not None and config.max_len > context:
        raise ConfigError(
            f"--max-len {config.max_len} exceeds the context length {context}; lower it"
        )


def _concurrency(config: GenerationConfig, engine: Engine) -> int:
    rows = engine.parts.config.schedule.max_running_requests
    assert rows is not None, "filled in when the engine was built"
    if config.concurrency is not None and config.concurrency > rows:
        raise ConfigError(
            f"--concurrency {config.concurrency} exceeds --max-running-requests {rows}"
        )
    return config.concurrency or rows
