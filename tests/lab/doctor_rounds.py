"""What the doctor says of the places of a text, beside what rounds of the engine accept there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specengine.core.batch import ScheduleBatch
from specengine.core.interfaces import LogitsOutput
from specengine.core.sampling import SamplingParams
from specengine.core.spec import DraftProposal, VerifyResult
from specengine.engine.build import build_engine, load
from specengine.engine.phases import Phases
from specengine.lab.doctor.draft_rows import LEVELS, Judgement
from specengine.lab.doctor.examined_drafter import read_drafter
from specengine.lab.doctor.hypothesis import Trial
from specengine.lab.doctor.target_rows import TargetForward, TargetRows
from specengine.lab.doctor.texts import write_texts
from specengine.lab.doctor.trial_runner import TrialRunner
from specengine.runner.loader.loaded_model import LoadedModel
from tests.lab.doctor_world import config_of


@dataclass
class Rounds:
    """Accepted drafts by prompt and by the root's place in the text."""

    accepted: dict[tuple[int, int], int] = field(default_factory=dict)

    def record(
        self,
        batch: ScheduleBatch,
        proposal: DraftProposal,
        output: LogitsOutput,
        result: VerifyResult,
    ) -> None:
        for req, accepted in zip(batch.reqs, result.num_accepted, strict=True):
            self.accepted[int(req.rid.split("#")[0]), req.seq_len - 1] = accepted


def judged(
    loaded: LoadedModel, draft: Path, algorithm: str, prompts: Sequence[str]
) -> tuple[Judgement, list[TargetRows]]:
    drafter = read_drafter(algorithm, loaded, str(draft))
    ids = [list(loaded.tokenizer(one).input_ids) for one in prompts]
    forward = TargetForward(loaded, 100)
    rows = [forward.rows(text) for text in write_texts(loaded, ids, 40)]
    found = TrialRunner(drafter, lambda name: rows).run(Trial(drafter.files))
    assert isinstance(found, Judgement)
    return found, rows


def compared_rounds(
    target: Path, draft: Path, algorithm: str, prompts: Sequence[str]
) -> list[tuple[int, int]]:
    """Drafts that stand by the doctor and by the engine, of every root that a round began with."""
    config = config_of(target, draft)
    spec = replace(config.spec, algorithm=algorithm, num_steps=LEVELS)
    loaded = load(replace(config, spec=spec), Phases())
    found, rows = judged(loaded, draft, algorithm, prompts)
    engine, rounds = build_engine(loaded.config, loaded), Rounds()
    engine.host_round.recorders.append(rounds)
    for one in rows:
        prompt = one.text.token_ids[: one.text.prompt_len]
        engine.add_request(str(one.text.prompt), prompt, SamplingParams(40, temperature=0.0))
    while engine.has_work:
        engine.step()
    by_row = iter(zip(found.prompts.tolist(), found.accepted.tolist(), strict=True))
    compared = []
    for one in rows:
        for root in range(one.text.prompt_len, len(one.tokens) - LEVELS - 1):
            number, accepted = next(by_row)
            assert number == one.text.prompt
            if (number, root) in rounds.accepted:
                compared.append((accepted, rounds.accepted[number, root]))
    assert next(by_row, None) is None
    return compared
