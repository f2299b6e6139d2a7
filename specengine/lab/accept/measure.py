"""One setting, one temperature: every conversation through one engine, every round noted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from specengine.core.errors import RequestError
from specengine.core.sampling import SamplingParams
from specengine.engine.loop import Engine
from specengine.engine.outputs import RequestOutput
from specengine.lab.accept.recorder import AcceptRecorder
from specengine.lab.accept.rounds import Array, RoundTable, build_table
from specengine.lab.accept.script import Replies, Script, Turn

OnAnswer = Callable[[int], None]  # gets the number of tokens of each finished answer


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. Each conversation has seeds of its own, the same for every setting."""

    temperature: float
    max_new_tokens: int
    seed: int

    def params(self, turn: Turn) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_new_tokens,
            seed=self.seed + turn.prompt * 64 + turn.turn,
        )


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: tuple[int, ...]


@dataclass
class Run:
    """What came of one run. Requests are numbered in the order in which they were asked."""

    table: RoundTable
    prompts: Array  # int64 [R], of each request
    turns: Array  # int64 [R]
    answers: dict[tuple[int, int], Answer]
    seconds: float
    skipped: list[str]  # why conversations were left out
    is_lossy: bool

    @property
    def replies(self) -> Replies:
        return texts(self.answers)


@dataclass
class _Session:
    """The requests of a run so far."""

    engine: Engine
    recorder: AcceptRecorder = field(default_factory=AcceptRecorder)
    asked: list[Turn] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of these
    lengths: list[int] = field(default_factory=list)  # of the answers, by request
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    is_lossy: bool = False

    def ask(self, turn: Turn, params: SamplingParams, name: str) -> None:
        number = len(self.asked)
        try:
            self.engine.add_request(str(number), turn.token_ids, params)
        except RequestError as error:
            self.skipped.append(f"{name}: {error}")
            return
        self.recorder.number(f"{number}#0")
        self.asked.append(turn)
        self.names.append(name)
        self.lengths.append(0)

    def take(self, output: RequestOutput) -> None:
        assert output.finish_reason is not None
        number, turn = int(output.rid), self.asked[int(output.rid)]
        self.lengths[number] = len(output.token_ids)
        self.is_lossy |= output.spec.is_lossy
        if output.finish_reason.message is not None:  # it failed, or memory ended it
            self.skipped.append(f"{self.names[number]}: {output.finish_reason.message}")
            return
        self.answers[turn.prompt, turn.turn] = Answer(output.text, tuple(output.token_ids))


def measure(
    engine: Engine, script: Script, sampling: Sampling, replies: Replies | None, on_answer: OnAnswer
) -> Run:
    """replies: what earlier questions were answered, for conversations that go on; None where this
    run's own answers are. Requests that cannot be served are named in `skipped`."""
    session, start = _Session(engine), perf_counter()
    engine.host_round.recorders.append(session.recorder)
    try:
        for number in range(script.num_turns):
            answers = replies if replies is not None else texts(session.answers)
            for turn in script.turns(number, answers):
                session.ask(turn, sampling.params(turn), script.name_of(turn))
            _finish(session, on_answer)
    finally:
        engine.host_round.recorders.remove(session.recorder)
    return Run(
        table=build_table(session.recorder.chunks, np.array(session.lengths, dtype=np.int64)),
        prompts=np.array([turn.prompt for turn in session.asked], dtype=np.int64),
        turns=np.array([turn.turn for turn in session.asked], dtype=np.int64),
        answers=session.answers,
        seconds=perf_counter() - start,
        skipped=session.skipped,
        is_lossy=session.is_lossy,
    )


def _finish(session: _Session, on_answer: OnAnswer) -> None:
    while session.engine.has_work:
        for output in session.engine.step():
            if output.finish_reason is not None:
                session.take(output)
                on_answer(len(output.token_ids))


def texts(answers: dict[tuple[int, int], Answer]) -> Replies:
    return {key: answer.text for key, answer in answers.items()}


def draft_vocabulary(drafter: Any, vocab_size: int) -> Array | None:
    """bool [V], the target's tokens that a draft model can say; None where it can say all, or
    where no model drafts."""
    while (inner := getattr(drafter, "inner", None)) is not None:
        drafter = inner
    ids = getattr(drafter, "target_ids", None)
    if ids is None:
        return None
    known = np.zeros(vocab_size, dtype=bool)
    known[ids.cpu().numpy()] = True
    return known
