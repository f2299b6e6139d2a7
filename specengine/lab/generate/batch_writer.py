"""Many conversations at a time, written down in the order of their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from hashlib import blake2b
from time import monotonic

import numpy as np

from specengine.core.errors import DataError
from specengine.draft.train.data.dataset import Document
from specengine.draft.train.data.writer import DatasetWriter, Part, count_documents
from specengine.lab.generate.config import GenerationConfig
from specengine.lab.generate.dialogue_writer import Ask, DialogueResult, DialogueWriter, Reply
from specengine.lab.generate.driver import EngineDriver
from specengine.lab.generate.filters import Dropped
from specengine.lab.generate.in_order import InOrder
from specengine.lab.generate.plans import Plan, Plans
from specengine.lab.generate.words import SeenTexts, words_of

# Tokens written at a time: what a process that is killed loses at most, beside what is running.
PART_TOKENS = 1 << 20
# Conversations between the oldest unfinished one and the newest, a request of the engine's.
WINDOW = 32
# As many conversations in a row that leave nothing are no accident.
HOPELESS = 4096


@dataclass(eq=False)
class Work:
    """A conversation in the making: first its opening turn, then the answers."""

    place: int  # in the order of this process
    plan: Plan
    opening_turn: Generator[Ask, Reply, str]
    conversation: Generator[Ask, Reply, DialogueResult] | None = None
    first: str = ""
    result: DialogueResult = field(default_factory=lambda: DialogueResult([]))
    dropped: str | None = None  # why
    keys: list[int] = field(default_factory=list)  # what duplicates of it are found by


class BatchWriter:
    """Runs the conversations of one process.

    Duplicates are looked for, and documents written, in the order of the conversations, whichever
    finishes first: the same seed gives the same data.
    """

    def __init__(
        self,
        config: GenerationConfig,
        plans: Plans,
        dialogue_writer: DialogueWriter,
        driver: EngineDriver[Work],
        writer: DatasetWriter,
    ) -> None:
        self.config = config
        self.writer = writer
        self.driver = driver
        self.num_answer_tokens = 0
        self._plans = plans
        self._dialogue_writer = dialogue_writer
        self._seen = SeenTexts()
        self._written: set[int] = set()  # hashes of documents
        self._documents: list[Document] = []  # that no part has yet
        self._num_unwritten = 0  # tokens of those
        self._counts: Counter[str] = Counter()
        self._keys: list[int] = []
        self._is_closed = False  # no conversation starts any more
        self._is_full = False
        self._num_in_vain = 0
        self._resume()
        self._gate: InOrder[Work] = InOrder(writer.position)
        self._shelf: InOrder[Work] = InOrder(writer.position)
        self._next = writer.position

    @property
    def is_over(self) -> bool:
        return self._is_full or (self._is_closed and self.driver.is_idle)

    @property
    def num_conversations(self) -> int:
        """Finished, kept or dropped, of this and earlier runs."""
        return self._shelf.next

    def close(self) -> None:
        """Start no more conversations; those that run are finished."""
        self._is_closed = True

    def step(self) -> None:
        """One forward of the target."""
        while self._may_start():
            self._start_next()
        for answered in self.driver.step():
            self._advance(answered.key, answered.reply)

    def _may_start(self) -> bool:
        ahead = self._next - self._shelf.next  # conversations that wait for the oldest
        has_room = self.driver.has_room and ahead < WINDOW * self.driver.concurrency
        return has_room and not self._is_closed and not self._is_full

    def flush(self) -> None:
        """Write down what is finished. A process that is killed goes on from here."""
        if self._shelf.next > self.writer.position:
            keys = np.array(self._keys, dtype=np.uint64)
            self._counts.update(count_documents(self._documents))
            self.writer.append(Part(self._documents, self._shelf.next, self._counts, keys))
        self._documents, self._counts, self._keys = [], Counter(), []
        self._num_unwritten = 0

    def _resume(self) -> None:
        for part in self.writer.resume():
            keys = part.keys.tolist()
            self._seen.load(keys)
            self._written.update(keys)
        self.num_answer_tokens = self.writer.counts["answer_tokens"]
        self._check_full()

    def _start_next(self) -> None:
        config, place = self.config, self._next
        plan = self._plans[config.shard_index + place * config.num_shards]
        if plan is None:
            self.close()
            return
        self._next += 1
        self._advance(Work(place, plan, self._dialogue_writer.first_turn(plan)), None)

    def _advance(self, work: Work, reply: Reply | None) -> None:
        """Go on with the reply, up to where the next is needed."""
        dialogue = work.conversation or work.opening_turn
        try:
            ask = next(dialogue) if reply is None else dialogue.send(reply)
        except StopIteration as end:
            if isinstance(end.value, DialogueResult):
                work.result = end.value
            else:
                work.first = end.value
            self._end_stage(work)
        except Dropped as drop:
            work.dropped = drop.reason
            self._end_stage(work)
        else:
            self.driver.submit(work, ask)

    def _end_stage(self, work: Work) -> None:
        if work.conversation is not None:
            self._shelve(work)
            return
        for due in self._gate.put(work.place, work):
            self._pass_gate(due)

    def _pass_gate(self, work: Work) -> None:
        """Conversations come here in order, each with its first turn."""
        if work.dropped is None:
            opening = len(words_of(work.plan.opening))
            work.keys = self._seen.add(words_of(work.first)[opening:])
            if not work.keys and not self._is_repeat(work.plan):
                work.dropped = "prompt duplicate"
        if work.dropped is None:
            work.conversation = self._dialogue_writer.converse(work.plan, work.first)
            self._advance(work, None)
        else:
            self._shelve(work)

    def _is_repeat(self, plan: Plan) -> bool:
        return not plan.is_self_written and self.config.prompt_repeats > 1

    def _shelve(self, work: Work) -> None:
        for due in self._shelf.put(work.place, work):
            if not self._is_full:
                self._write(due)

    def _write(self, work: Work) -> None:
        """Conversations come here in order, each with its documents."""
        new = [one for one in work.result.documents if self._is_new(one, work)]
        reason = work.dropped or (None if new else "answer duplicate")
        counts = self._counts
        counts["conversations"] += 1
        counts.update(f"dropped: {note}" for note in ([reason] if reason else work.result.notes))
        if new:
            counts[f"category: {work.plan.category}"] += len(new)
        self._documents += new
        self._num_unwritten += sum(map(len, new))
        self._keys += work.keys
        self.num_answer_tokens += sum(int(one.loss.sum()) for one in new)
        self._check_hope(bool(new))
        self._check_full()
        if self._is_full or self._num_unwritten >= PART_TOKENS:
            self.flush()

    def _is_new(self, document: Document, work: Work) -> bool:
        digest = blake2b(document.tokens.tobytes(), digest_size=8).digest()
        key = int.from_bytes(digest, "big")
        if key in self._written:
            return False
        self._written.add(key)
        work.keys.append(key)
        return True

    def _check_full(self) -> None:
        wanted = self.config.max_tokens
        self._is_full = wanted is not None and self.num_answer_tokens >= wanted

    def _check_hope(self, succeeded: bool) -> None:
        self._num_in_vain = 0 if succeeded else self._num_in_vain + 1
        if self._num_in_vain >= HOPELESS:
            raise DataError(
                f"the last {HOPELESS} conversations left nothing to learn from "
                f"({_most_common(self._counts)}); look at the target's chat template and at the "
                "limits on prompts and answers"
            )

    def run(self, deadline: float | None, watch: Callable[[BatchWriter], None]) -> None:
        """To the end. deadline: seconds of time.monotonic(), after which nothing is started.
        watch: called after every forward."""
        try:
            while not self.is_over:
                self.step()
                if deadline is not None and monotonic() >= deadline:
                    self.close()
                watch(self)
        finally:
            self.driver.abort()
            self.flush()


def _most_common(counts: Counter[str]) -> str:
    found = [(name, count) for name, count in counts.most_common() if name.startswith("dropped")]
    return ", ".join(f"{name} {count}" for name, count in found[:3])
