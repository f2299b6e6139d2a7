"""One examination, from the files of a drafter to a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specengine.core.config import EngineConfig
from specengine.core.errors import ConfigError
from specengine.engine.build import load
from specengine.engine.phases import Phases
from specengine.lab.doctor.checks import Check, check_coverage, check_features, check_tokenizer
from specengine.lab.doctor.examined_drafter import ExaminedDrafter, find_algorithm, read_drafter
from specengine.lab.doctor.features import compare_features
from specengine.lab.doctor.files import require_new
from specengine.lab.doctor.hypotheses import (
    attention,
    feeding,
    joining,
    layers,
    norms,
    tables,
    templates,
    vocabulary,
)
from specengine.lab.doctor.hypothesis import SERVED, Hypothesis, Trial
from specengine.lab.doctor.report import Diagnosis
from specengine.lab.doctor.scores import score
from specengine.lab.doctor.search import Progress, Search, is_healthy
from specengine.lab.doctor.target_rows import TargetForward, TargetRows
from specengine.lab.doctor.texts import render, served_template, write_texts
from specengine.lab.doctor.trial_runner import MakeTexts, Refused, TrialRunner

_ORDER = (layers, vocabulary, joining, norms, attention, tables, feeding)
_COMPARED = 4  # texts whose features are compared


@dataclass(frozen=True)
class Examination:
    """config: names target, draft and, where it is known, the algorithm. new_tokens: of each
    answer. fixed: where to write the draft without what is wrong with it."""

    config: EngineConfig
    prompts: Sequence[str]
    new_tokens: int = 48
    with_reference: bool = True
    fixed: Path | None = None


def diagnose(examination: Examination, progress: Progress) -> Diagnosis:
    """Raises ConfigError or ModelLoadError where target or draft cannot be read at all."""
    if examination.fixed is not None:
        require_new(examination.fixed)
    drafter = _read_drafter(examination.config)
    draft = drafter.files.directory
    named = templates.renderings(served_template(drafter.loaded.tokenizer), draft)
    runner = TrialRunner(drafter, _text_maker(drafter, examination, named))
    trial = Trial(drafter.files)
    progress("as configured")
    before = runner.run(trial)
    search = Search(runner, lambda trial: _hypotheses(drafter, trial), progress)
    fixed, after = search.run(trial, before)
    if not is_healthy(after) and drafter.has_features:
        others = Search(runner, lambda trial: templates.hypotheses(list(named), trial), progress)
        _, after = others.run(fixed, after)
        search.tried += others.tried
        search.causes += others.causes
    progress("features")
    texts = runner.lessons(SERVED).texts
    accepted = 0.0 if isinstance(after, Refused) else float(after.hits[:, 0].mean())
    checks = _checks(examination, drafter, texts, check_coverage(fixed.files, texts, accepted))
    written = None
    if examination.fixed is not None and fixed.files is not trial.files:
        fixed.files.write_whole(examination.fixed)
        written = str(examination.fixed)
    return Diagnosis(
        target=drafter.loaded.source.name,
        draft=str(draft),
        algorithm=drafter.algorithm,
        num_texts=len(texts),
        refusal=before.message if isinstance(before, Refused) else "",
        before=None if isinstance(before, Refused) else score(before),
        after=None if isinstance(after, Refused) else score(after),
        causes=search.causes,
        tried=search.tried,
        checks=checks,
        written=written,
        form=drafter.form,
        not_judged=drafter.not_judged,
    )


def _read_drafter(config: EngineConfig) -> ExaminedDrafter:
    draft = config.spec.draft_model_path or config.model.model
    algorithm = find_algorithm(draft, config.spec.algorithm)
    spec = replace(config.spec, algorithm=algorithm)
    return read_drafter(algorithm, load(replace(config, spec=spec), Phases()), draft)


def _text_maker(
    drafter: ExaminedDrafter, examination: Examination, named: dict[str, str | None]
) -> MakeTexts:
    loaded, new_tokens = drafter.loaded, examination.new_tokens
    context = loaded.config.model.context_length
    assert context is not None, "resolved"

    def make(name: str) -> list[TargetRows]:
        prompts = render(loaded.tokenizer, examination.prompts, named[name])
        most = max(map(len, prompts)) + new_tokens
        if most > context:
            raise ConfigError(
                f"prompts of up to {most - new_tokens} tokens with answers of {new_tokens} do not "
                f"fit into {context} positions (--context-length); give shorter ones"
            )
        texts = write_texts(loaded, prompts, new_tokens)
        forward = TargetForward(loaded, most)
        return [forward.rows(text) for text in texts]

    return make


def _hypotheses(drafter: ExaminedDrafter, trial: Trial) -> Iterator[Hypothesis]:
    for one in _ORDER:
        yield from one.hypotheses(drafter, trial)


def _checks(
    examination: Examination,
    drafter: ExaminedDrafter,
    texts: Sequence[TargetRows],
    coverage: Check | None,
) -> list[Check]:
    draft, tokenizer = drafter.files.directory, drafter.loaded.tokenizer
    found = [coverage, check_tokenizer(draft, tokenizer)]
    if examination.with_reference and drafter.has_features:
        found.append(check_features(compare_features(drafter.loaded, texts[:_COMPARED])))
    return [check for check in found if check is not None]
