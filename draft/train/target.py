"""A target from nothing: text, tokenizer, data set, model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from specengine.core.errors import ConfigError
from specengine.core.options import option
from specengine.draft.train.causal_lm import CausalLmTask, ModelShape, learns_all, learns_answers
from specengine.draft.train.config import TrainConfig
from specengine.draft.train.conversations import read_conversations, texts_of, tokenize
from specengine.draft.train.data.dataset import TokenDataset
from specengine.draft.train.data.manifest import MANIFEST
from specengine.draft.train.model_directory import make_llama
from specengine.draft.train.processes import Processes
from specengine.draft.train.tokenizer import NUM_BYTES, SPECIALS, train_tokenizer


@dataclass(frozen=True, kw_only=True)
class TargetConfig(ModelShape):
    section: ClassVar[str] = "task"

    text: str | None = option(
        None, "what to learn: JSONL of `messages`, or a data set that a ChatML model wrote"
    )
    tokenizer: str | None = option(None, "directory of a tokenizer; default: train one on the text")
    vocab_size: int = option(4096, "of a tokenizer that is trained")
    learn: str = option("all", "every token, or answers alone", ("all", "answers"))

    def _check_ranges(self) -> None:
        super()._check_ranges()
        least = NUM_BYTES + len(SPECIALS)
        self._require(self.vocab_size >= least, "vocab_size", f"must be at least {least}")


@dataclass(frozen=True)
class TargetText:
    """What a target is trained on."""

    tokenizer: Any
    dataset: TokenDataset


def prepare_text(config: TrainConfig, processes: Processes) -> TargetText:
    """The tokenizer, trained if need be, and the data set in its ids, written once into the run's
    directory. Raises ConfigError where no data is named, or DataError."""
    task = config.task
    assert isinstance(task, TargetConfig)
    if not task.text and not config.data.path:
        raise ConfigError(
            "no data: name task.text (JSONL of `messages`, or a data set of another model), or "
            "data.path (a data set in the ids of task.tokenizer)"
        )
    if config.data.path and (task.text or not task.tokenizer):
        raise ConfigError("data.path is in the ids of some tokenizer; name it as task.tokenizer")
    if config.data.path:
        return TargetText(_load_tokenizer(str(task.tokenizer)), TokenDataset(config.data.path))
    if processes.is_first:
        _write_text(task, Path(config.run.output))
    processes.wait()
    return _written_text(Path(config.run.output))


def _write_text(task: TargetConfig, output: Path) -> None:
    directory, tokenizer_directory = output / "data", output / "tokenizer"
    names = ("text", "tokenizer", "vocab_size", "max_positions")
    made = {name: getattr(task, name) for name in names}
    if (directory / MANIFEST).is_file():
        _check_made(directory, made)
        return
    source = Path(str(task.text))
    if task.tokenizer is None:
        texts = texts_of(read_conversations(source))
        tokenizer = train_tokenizer(texts, task.vocab_size, task.max_positions)
    else:
        tokenizer = _load_tokenizer(task.tokenizer)
    tokenizer.save_pretrained(tokenizer_directory)
    tokenize(read_conversations(source), tokenizer, directory, output.name, made)


def _check_made(directory: Path, wanted: dict[str, Any]) -> None:
    made = TokenDataset(directory, verify=False).manifest.made
    for name, value in wanted.items():
        if made.get(name) != value:
            raise ConfigError(
                f"{directory} was made with task.{name}={made.get(name)!r}, and this run has "
                f"{value!r}; choose another run.output, or delete that folder"
            )


def _written_text(output: Path) -> TargetText:
    return TargetText(_load_tokenizer(str(output / "tokenizer")), TokenDataset(output / "data"))


def _load_tokenizer(directory: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError and others
        raise ConfigError(f"cannot read the tokenizer {directory}: {error}") from error


def make_target_task(config: TrainConfig, tokenizer: Any) -> CausalLmTask:
    """Raises ConfigError or ModelLoadError."""
    task = config.task
    assert isinstance(task, TargetConfig)
    learns = learns_all if task.learn == "all" else learns_answers
    module = make_llama(task, tokenizer, len(tokenizer))
    dtype: torch.dtype = getattr(torch, task.dtype)
    return CausalLmTask("target", module, tokenizer, dtype, learns)
