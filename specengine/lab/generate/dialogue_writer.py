"""How one conversation comes about, as dialogues with the target.

A dialogue is a generator: it yields requests to the target, is sent the replies, and returns its
result. Running many dialogues at once keeps the engine full.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from specengine.core.request import FinishReason
from specengine.core.sampling import SamplingParams
from specengine.draft.train.data.dataset import Document
from specengine.lab.generate.chat import ChatFormat, Message
from specengine.lab.generate.config import GenerationConfig
from specengine.lab.generate.filters import Dropped, check_words, trim_loop
from specengine.lab.generate.plans import Plan, derive_seed
from specengine.lab.generate.transcript import Transcript
from specengine.lab.generate.words import ForbiddenTexts, words_of


@dataclass(frozen=True)
class Ask:
    prompt_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True)
class Reply:
    token_ids: list[int]
    finish: FinishReason


@dataclass(frozen=True)
class Answer:
    prompt_ids: list[int]
    token_ids: list[int]  # without the repetitions of an endless loop
    sampling: SamplingParams
    finish: FinishReason

    @property
    def is_whole(self) -> bool:
        return self.finish.kind == "stop"

    def text(self, chat: ChatFormat) -> str:
        return chat.text_of(self.token_ids, self.sampling, self.finish)


@dataclass
class DialogueResult:
    """A finished conversation. notes: reasons to count, such as a later turn that was dropped."""

    documents: list[Document]
    notes: list[str] = field(default_factory=list)


class DialogueWriter:
    """Writes conversations. Its dialogues raise Dropped where nothing is worth keeping."""

    def __init__(
        self, config: GenerationConfig, chat: ChatFormat, forbidden: ForbiddenTexts
    ) -> None:
        self._config = config
        self._chat = chat
        self._forbidden = forbidden

    def first_turn(self, plan: Plan) -> Generator[Ask, Reply, str]:
        """-> what the user says first."""
        if plan.is_self_written:
            prompt_ids = self._chat.first_user_prompt(plan.opening)
            return (yield from self._write_turn(plan, prompt_ids, plan.opening, turn=0))
        for turn in plan.turns:
            self._check_allowed(words_of(turn))
        return plan.turns[0]

    def converse(self, plan: Plan, first: str) -> Generator[Ask, Reply, DialogueResult]:
        """Answer the first turn, then the others."""
        messages: list[Message] = []
        if plan.system is not None:
            messages.append({"role": "system", "content": plan.system})
        messages.append({"role": "user", "content": first})
        transcript, notes = Transcript(), []
        answer = yield from self._answer(plan, messages, 0)
        transcript.add(answer.prompt_ids, answer.token_ids)
        try:
            for turn in range(1, plan.num_turns):
                if not answer.is_whole:
                    break
                yield from self._go_on(plan, messages, answer, turn)
                answer = yield from self._answer(plan, messages, turn)
                transcript.add(answer.prompt_ids, answer.token_ids)
        except Dropped as drop:
            notes.append(f"later turn: {drop.reason}")
        return DialogueResult(transcript.documents(), notes)

    def _go_on(
        self, plan: Plan, messages: list[Message], last: Answer, turn: int
    ) -> Generator[Ask, Reply, None]:
        """Put the last answer and the user's next turn among the messages."""
        if plan.is_self_written:
            prompt_ids = self._chat.next_user_prompt(last.prompt_ids, last.token_ids)
            user = yield from self._write_turn(plan, prompt_ids, "", turn)
        else:
            user = plan.turns[turn]
        messages.append({"role": "assistant", "content": last.text(self._chat)})
        messages.append({"role": "user", "content": user})

    def _write_turn(
        self, plan: Plan, prompt_ids: list[int], opening: str, turn: int
    ) -> Generator[Ask, Reply, str]:
        config, end = self._config, self._chat.turn_end
        sampling = SamplingParams(
            max_tokens=self._room(prompt_ids, config.user_max_tokens),
            temperature=plan.user_temperature,
            stop=end.texts,
            stop_token_ids=end.token_ids,
            seed=derive_seed(config.seed, plan.number, f"user {turn}"),
        )
        reply = yield Ask(prompt_ids, sampling)
        if reply.finish.kind != "stop":
            raise Dropped("prompt too long")
        text = (opening + self._chat.text_of(reply.token_ids, sampling, reply.finish)).strip()
        self._check_written(text)
        return text

    def _answer(
        self, plan: Plan, messages: list[Message], turn: int
    ) -> Generator[Ask, Reply, Answer]:
        config = self._config
        prompt_ids = self._chat.answer_prompt(messages)
        sampling = SamplingParams(
            max_tokens=self._room(prompt_ids, config.answer_max_tokens),
            temperature=plan.temperature,
            seed=derive_seed(config.seed, plan.number, f"answer {turn}"),
        )
        reply = yield Ask(prompt_ids, sampling)
        is_whole = reply.finish.kind == "stop"
        kept = reply.token_ids if is_whole else trim_loop(reply.token_ids)
        if len(kept) < config.min_answer_tokens:
            raise Dropped("answer too short")
        return Answer(prompt_ids, kept, sampling, reply.finish)

    def _room(self, prompt_ids: list[int], wanted: int) -> int:
        room = self._config.max_len - len(prompt_ids)
        if room < self._config.min_answer_tokens:
            raise Dropped("sample too long")
        return min(room, wanted)

    def _check_written(self, text: str) -> None:
        if "\ufffd" in text or self._chat.has_special(text):
            raise Dropped("prompt malformed")
        words = words_of(text)
        check_words(words, self._config.min_prompt_words)
        self._check_allowed(words)

    def _check_allowed(self, words: list[str]) -> None:
        if self._forbidden.occurs_in(words):
            raise Dropped("prompt in the evaluation set")
