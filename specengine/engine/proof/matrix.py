"""Subjects through the real engine on one model, in every state that its memory can be in."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch

from specengine.core.config import EngineConfig, SpecConfig
from specengine.core.sampling import SamplingParams
from specengine.engine.build import load
from specengine.engine.factories import make_registered, verifier_name
from specengine.engine.loop import Engine
from specengine.engine.phases import Phases
from specengine.engine.proof.check import AS_REPORTED, CHI_SQUARED, Check
from specengine.engine.proof.draft_log import DraftLog
from specengine.engine.proof.draft_mutants import SpoiltDrafter
from specengine.engine.proof.engine_mutants import EngineMutant
from specengine.engine.proof.joint import Continuations, LogitProbe, Text
from specengine.engine.proof.runs import (
    MAX_MUTANT_P,
    MIN_P,
    TIES,
    Ask,
    complete,
    divergences,
    looks,
)
from specengine.engine.proof.subjects import (
    FRESH,
    LENGTH,
    PLAIN,
    PREFIX_HIT,
    RETRACTED,
    State,
    Subject,
)
from specengine.runner.loader.loaded_model import LoadedModel

_TEXTS = (
    "to be or not to be, that is the question: to be or not to be, that is",
    "The quick brown fox jumps over the lazy dog, and the quick brown fox",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a",
    "0123456789012345678901234567890123456789",
    "x",
)
_NUM_TOKENS = 4  # that output is made of where histograms are taken
# Tokens after those of the histograms: drafts are as deep as they can be; memory runs out.
_BEYOND, _LONG_BEYOND = 3, 8
# Two prompts side by side, so that requests which change places are noticed.
_PROMPT_LENGTHS = (24, 29)
_COMMON_LENGTH = 17
_MUTANT_STEP = 400

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.5},
    "high temperature": {"temperature": 2.0},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "penalties": {
        "frequency_penalty": 1.2,
        "presence_penalty": 0.8,
        "repetition_penalty": 1.01,
    },
    "all parameters": {
        "temperature": 1.3,
        "top_k": 3,
        "top_p": 0.95,
        "min_p": 0.05,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.01,
    },
}
_ALL = "all parameters"
_OTHER: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}  # of the second prompt

Seen = tuple[Counter[Text], Counter[Text]]  # of the two prompts


@dataclass(frozen=True)
class Effort:
    num_requests: int  # of each histogram; half as many where few run at a time
    mutant_requests: int  # at most, greedy or of a histogram, before a mutant counts as missed
    draft_requests: int  # of each histogram of sampled drafts alone
    greedy_tokens: int


class EngineProof:
    """What comes of subjects, held against what plain decoding says."""

    def __init__(self, config: EngineConfig, effort: Effort) -> None:
        plain = replace(config, spec=SpecConfig())
        self.config = config
        self.effort = effort
        self.loaded: LoadedModel = load(plain, Phases())
        self.plain = PLAIN.build(plain, State(FRESH), self.loaded, [])
        self.probe = LogitProbe(self.plain)
        self.prompts = [self.loaded.tokenizer(text)["input_ids"] for text in _TEXTS]
        self.tokens = self._few_tokens(self.prompts[0])
        few = self._few_prompts(len(_PROMPT_LENGTHS), seed=0)
        self.texts = tuple(Continuations(self.probe, prompt, self.tokens, LENGTH) for prompt in few)
        self.greedy_prompts = [*self.prompts, *few]
        self.greedy_asks = self._greedy_asks(self.greedy_prompts)
        self.expected = complete(self.plain, self.greedy_asks, State(FRESH)).outputs

    def in_state(self, subject: Subject, state: State) -> Iterator[Check]:
        """With every verifier: histograms, among greedy requests that must be as ever."""
        for name, engine in self._engines(subject, state):
            label = f"{subject.name}, {name}; {state}"
            self._warm_up(engine, state, self.greedy_prompts)
            count = self.effort.num_requests // (2 if state.is_slow else 1)
            asks = self._sampled_asks(_ALL, count, zlib.crc32(label.encode()), state)
            run = complete(engine, [*asks, *self.greedy_asks], state)
            seen = self._seen(run.outputs[:count])
            yield Check(CHI_SQUARED, label, self._p(seen, _ALL), ">=", MIN_P)
            yield self._identity(label, run.outputs[count:], self.greedy_asks, self.expected)
            yield run.check(label, state)

    def with_settings(self, subject: Subject, settings: Sequence[str]) -> Iterator[Check]:
        """Each sampling parameter by itself, of fresh requests."""
        for name, engine in self._engines(subject, State(FRESH)):
            for setting in settings:
                label = f"{subject.name}, {name}; {setting}"
                count, seed = self.effort.num_requests // 2, zlib.crc32(label.encode())
                fresh = State(FRESH)
                run = complete(engine, self._sampled_asks(setting, count, seed, fresh), fresh)
                p = self._p(self._seen(run.outputs), setting)
                yield Check(CHI_SQUARED, label, p, ">=", MIN_P)

    def of_drafts(self, subject: Subject) -> Iterator[Check]:
        """Sampled drafts of thousands of requests: whether they are drawn from what they report,
        and a histogram as large. Nothing where drafts report nothing, or no rule that weighs them
        is to be proved."""
        state = State(FRESH)
        drafter = subject.build(self.config, state, self.loaded, self.tokens).drafter
        asked = self.config.spec.verify
        name = verifier_name(subject.spec, drafter) if asked == "auto" else asked
        if not (drafter.emits_probs and make_registered(name, subject.spec).needs_draft_probs):
            return
        if not subject.may_be_judged_by(name, drafter):  # a rule of chains, and a tree
            return
        label = f"{subject.name}, {name}; many, fresh"
        judged, log = subject.verified_by(name), DraftLog()
        engine = judged.build(self.config, state, self.loaded, self.tokens)
        asks = self._sampled_asks("temperature", self.effort.draft_requests, 1, state)
        log.watch(engine.host_round.drafter)
        seen = self._seen(complete(engine, asks, state).outputs)
        yield Check(CHI_SQUARED, label, self._p(seen, "temperature"), ">=", MIN_P)
        if engine.pipeline is not None:  # its drafts are not seen
            graph = replace(self.config.graph, disable_cuda_graph=True)
            eager, log = replace(self.config, graph=graph), DraftLog()
            engine = judged.build(eager, state, self.loaded, self.tokens)
            log.watch(engine.host_round.drafter)
            complete(engine, asks, state)
        yield Check(AS_REPORTED, label, log.p_value, ">=", MIN_P, f"{log.num_drafts} drafts")

    def catches(self, mutant: EngineMutant, state: State) -> Check:
        parts = mutant.subject.build(self.config, state, self.loaded, self.tokens).parts
        if mutant.spoil is not None:
            parts = replace(parts, drafter=SpoiltDrafter(parts.drafter, mutant.spoil))
        engine = Engine(replace(parts, verifier=mutant.verifier))
        label = f"{mutant.subject.name}, {mutant.name}; {state}"
        self._warm_up(engine, state, self.greedy_prompts)
        if mutant.caught_by == "greedy identity":
            return self._changes_text(engine, label, state)
        seen: Seen = (Counter(), Counter())
        count, p, log = 0, 1.0, DraftLog()
        looks_at_drafts = mutant.caught_by == AS_REPORTED
        if looks_at_drafts:
            log.watch(engine.host_round.drafter)
        for until in looks(_MUTANT_STEP, self.effort.mutant_requests):
            asks = self._sampled_asks(mutant.setting, until - count, count, state)
            for total, new in zip(
                seen, self._seen(complete(engine, asks, state).outputs), strict=True
            ):
                total.update(new)
            count = until
            p = log.p_value if looks_at_drafts else self._p(seen, mutant.setting)
            if p <= MAX_MUTANT_P:
                break
        note = f"after {count} requests"
        name = AS_REPORTED if looks_at_drafts else CHI_SQUARED
        return Check(f"{name} catches", label, p, "<=", MAX_MUTANT_P, note)

    def _changes_text(self, engine: Engine, label: str, state: State) -> Check:
        """The usual greedy requests, then others, until a text is not that of plain decoding."""
        asks, expected, count = self.greedy_asks, self.expected, 0
        for until in looks(len(self.greedy_prompts), self.effort.mutant_requests // 2):
            if count:
                prompts = self._few_prompts(until - count, seed=count)
                self._warm_up(engine, state, prompts)
                asks = self._greedy_asks(prompts)
                expected = complete(self.plain, asks, State(FRESH)).outputs
            outputs, count = complete(engine, asks, state).outputs, until
            found = self._identity(label, outputs, asks, expected)
            if found.statistic >= 1.0:
                break
        note = "; ".join(filter(None, (f"after {2 * count} requests", found.note)))
        return Check("greedy identity catches", label, found.statistic, ">=", 1.0, note)

    def _engines(self, subject: Subject, state: State) -> Iterator[tuple[str, Engine]]:
        """One for each verifier, built as it is served: on a GPU a graph may hold the round."""
        drafter = subject.build(self.config, state, self.loaded, self.tokens).drafter
        for name in subject.verifiers(drafter):
            if self.config.spec.verify in ("auto", name):
                judged = subject.verified_by(name)
                yield name, judged.build(self.config, state, self.loaded, self.tokens)

    def _warm_up(self, engine: Engine, state: State, prompts: Sequence[list[int]]) -> None:
        if state.kind == PREFIX_HIT:
            params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            complete(engine, [Ask(prompt, params) for prompt in prompts], state)

    def _sampled_asks(self, setting: str, count: int, first_seed: int, state: State) -> list[Ask]:
        """The two prompts in turn, each with a seed of its own."""
        beyond = _LONG_BEYOND if state.kind == RETRACTED else _BEYOND
        params = [replace(one, max_tokens=LENGTH + beyond) for one in self._params(setting)]
        return [
            Ask(self.texts[i % 2].prompt, replace(params[i % 2], seed=first_seed + i))
            for i in range(count)
        ]

    def _params(self, setting: str) -> tuple[SamplingParams, SamplingParams]:
        few = SamplingParams(ignore_eos=True, logit_bias=dict.fromkeys(self.tokens, 100.0))
        return replace(few, **SETTINGS[setting]), replace(few, **_OTHER)

    def _seen(self, outputs: list[list[int]]) -> Seen:
        first, second = (
            Counter(tuple(output[:LENGTH]) for output in outputs[i::2]) for i in range(2)
        )
        return first, second

    def _p(self, seen: Seen, setting: str) -> float:
        """The p-value of the less likely of two histograms, corrected for there being two (Šidák
        1967)."""
        columns = zip(self.texts, seen, self._params(setting), strict=True)
        least = min(texts.p_value(one, params) for texts, one, params in columns)
        return least * (2 - least)

    def _greedy_asks(self, prompts: Sequence[list[int]]) -> list[Ask]:
        """For each prompt two: free text, and text of the few tokens, where drafts are right by
        chance as well."""
        free = SamplingParams(
            max_tokens=self.effort.greedy_tokens, temperature=0.0, ignore_eos=True
        )
        few = replace(free, logit_bias=dict.fromkeys(self.tokens, 100.0))
        return [Ask(prompt, params) for params in (free, few) for prompt in prompts]

    def _identity(
        self,
        label: str,
        outputs: Sequence[list[int]],
        asks: Sequence[Ask],
        expected: Sequence[list[int]],
    ) -> Check:
        tie = TIES[self.loaded.config.model.dtype]
        return divergences(self.probe, asks, outputs, expected, tie).check(label)

    def _few_tokens(self, prompt: list[int]) -> list[int]:
        """The likeliest after the prompt, none of which ends a text."""
        logits_V = self.probe.logits([prompt])[0]
        logits_V[list(self.plain.parts.eos_ids)] = float("-inf")
        found: list[int] = logits_V.topk(_NUM_TOKENS).indices.tolist()
        return found

    def _few_prompts(self, count: int, seed: int) -> list[list[int]]:
        """Prompts of the few tokens, which repeat often enough to be drafted from. They
        begin alike and go on each in its own way."""
        generator = torch.Generator().manual_seed(seed)
        orders = torch.randint(_NUM_TOKENS, (count, max(_PROMPT_LENGTHS)), generator=generator)
        orders[:, :_COMMON_LENGTH] = orders[0, :_COMMON_LENGTH].clone()
        rows = zip(orders.tolist(), cycle(_PROMPT_LENGTHS), strict=False)
        return [[self.tokens[i] for i in order[:length]] for order, length in rows]
