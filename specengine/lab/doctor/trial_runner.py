"""Runs trials of a drafter: writes its files as they would be, loads them, and judges them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specengine.core.errors import ConfigError, ModelLoadError
from specengine.draft.loaded import LoadedDraft
from specengine.engine.draft_build import load_draft
from specengine.engine.phases import Phases
from specengine.lab.doctor.block_rows import BlockJudge, masks_judged
from specengine.lab.doctor.draft_rows import (
    FeatureJudge,
    Judge,
    Judgement,
    Lessons,
    ModelJudge,
    num_rows,
)
from specengine.lab.doctor.examined_drafter import ExaminedDrafter
from specengine.lab.doctor.files import DraftFiles
from specengine.lab.doctor.hypothesis import Trial
from specengine.lab.doctor.target_rows import TargetRows
from specengine.runner.attention import make_attention_backend

MakeTexts = Callable[[str], list[TargetRows]]


@dataclass(frozen=True)
class Refused:
    """The engine does not load these files."""

    message: str


class TrialRunner:
    def __init__(self, drafter: ExaminedDrafter, make_texts: MakeTexts) -> None:
        """make_texts: by the name of a rendering."""
        self.drafter = drafter
        self._make_texts = make_texts
        self._lessons: dict[str, Lessons] = {}
        self._loaded: tuple[DraftFiles, Judge | Refused] | None = None

    def lessons(self, name: str) -> Lessons:
        """Of the answers that are long enough. Raises ConfigError where there are none."""
        if name not in self._lessons:
            rows = self._make_texts(name)
            kept = [one for one in rows if num_rows(one) >= one.text.prompt_len]
            if len(kept) < 2:
                raise ConfigError(
                    f"the target ends {len(rows) - len(kept)} of {len(rows)} answers at once, so "
                    "that there is nothing to judge a drafter on; give other --prompts"
                )
            self._lessons[name] = Lessons(kept)
        return self._lessons[name]

    def run(self, trial: Trial) -> Judgement | Refused:
        judge = self._judge(trial.files)
        if isinstance(judge, Refused):
            return judge
        return judge.judge(self.lessons(trial.view.text), trial.view)

    def _judge(self, files: DraftFiles) -> Judge | Refused:
        """The last one is kept: trials that differ in their view alone come in a row."""
        if self._loaded is None or self._loaded[0] is not files:
            self._loaded = None
            self._loaded = (files, self._load(files))
        return self._loaded[1]

    def _load(self, files: DraftFiles) -> Judge | Refused:
        draft = load_files(self.drafter, files)
        if isinstance(draft, Refused):
            return draft
        loaded = self.drafter.loaded
        backend = make_attention_backend(loaded.config.model.attention_backend, loaded.device)
        if self.drafter.algorithm == "DFLASH":
            num_steps = loaded.config.spec.num_steps
            assert num_steps is not None, "resolved"
            return BlockJudge(draft, loaded.device, backend, masks_judged(num_steps))
        judge = FeatureJudge if self.drafter.has_features else ModelJudge
        return judge(draft, loaded.device, backend)


def load_files(drafter: ExaminedDrafter, files: DraftFiles) -> LoadedDraft | Refused:
    """As serving loads them."""
    loaded = drafter.loaded
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, files.directory.name)
        files.write(directory)
        spec = replace(loaded.config.spec, draft_model_path=str(directory))
        try:
            return load_draft(replace(loaded.config, spec=spec), loaded, Phases())
        except (ModelLoadError, ConfigError) as error:
            return Refused(str(error).replace(str(directory), str(files.directory)))
